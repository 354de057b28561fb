"""lm-eval on the engine in this process: the model `fp8serve` for its command line.

    python -m fp8serve.bench.harness --model fp8serve --model_args model=DIR --include_path benchmarks/tasks \\
        --tasks fp8serve_arithmetic,fp8serve_python,fp8serve_cloze

model_args: `model`, a directory, GGUF file, smollm2 or a name on the hub, and the engine's options, such as
recipe=bf16. Log-probabilities are the engine's for a prompt, equal to the bit to a server's answers (lm-eval's
`local-completions`): neither the order of requests nor their neighbours change a score. Needs the package `lm-eval`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found,import-untyped,unused-ignore]
from lm_eval.api.registry import register_model  # type: ignore[import-not-found,import-untyped,unused-ignore]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found,import-untyped,unused-ignore]

from fp8serve.engine.engine import Engine
from fp8serve.engine.output import TokenLogprob
from fp8serve.errors import ModelError
from fp8serve.hub import find_model
from fp8serve.model.text.tokenizer import lacks_tokenizer

LONGEST_ANSWER = 256  # tokens, where a task does not say


@register_model("fp8serve")
class EngineLM(TemplateLM):  # type: ignore[misc,unused-ignore]
    """lm-eval's interface to an engine of its own."""

    def __init__(self, model: str, batch_size: Any = None, device: str | None = None, **options: Any) -> None:
        """options: those of the Engine. batch_size and device are lm-eval's; the former changes nothing here.

        ModelError: the model has no tokenizer, or no token to begin a text with.
        """
        super().__init__()
        self.engine = Engine(find_model(model), device=_device(device), **options)
        if self.engine.tokenizer is None:
            raise ModelError(lacks_tokenizer(self.engine.loaded.model_dir))
        self.text = self.engine.tokenizer
        self.longest = self.engine.limits.max_model_len - 1  # the engine adds a token to every prompt

    @property
    def eot_token_id(self) -> int:
        if not self.engine.eos_ids:
            raise ModelError("The model has no end-of-text token, which texts without a context begin with.")
        return int(self.engine.eos_ids[0])

    @property
    def tokenizer_name(self) -> str:
        return str(self.engine.loaded.model_dir)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.text.encode(string, add_special_tokens=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """For each continuation after its context: the sum of log-probabilities, and whether it is the greedy one."""
        return self._scores([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows as long as the model's context."""
        return [self._whole(request.args[0]) for request in requests]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy answer, or the sampled one where the task says so, up to the first of its stop texts."""
        return [self._answer(*request.args) for request in requests]

    def _whole(self, text: str) -> float:
        windows = get_rolling_token_windows(
            self.tok_encode(text, add_special_tokens=False), self.eot_token_id, self.longest - 1, context_len=1
        )
        return sum(score for score, _ in self._scores([make_disjoint_window(window) for window in windows]))

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation). A text that is too long loses its beginning."""
        texts = [[*context, *continuation][-self.longest :] for context, continuation in pairs]
        done = self.engine.generate(texts, max_new_tokens=1, temperature=0.0, prompt_logprobs=1) if texts else []
        scored = [
            (completion.prompt_logprobs or [], len(tokens)) for completion, (_, tokens) in zip(done, pairs, strict=True)
        ]
        return [_sum(result[max(0, len(result) - count) :]) for result, count in scored]

    def _answer(self, context: str, arguments: dict[str, Any]) -> str:
        stop = arguments.get("until") or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        new = int(arguments.get("max_gen_toks", LONGEST_ANSWER))
        temperature = float(arguments.get("temperature", 0.0)) if arguments.get("do_sample") else 0.0
        prompt = self.tok_encode(context)[-(self.longest - new) :]
        (done,) = self.engine.generate([prompt], max_new_tokens=new, temperature=temperature, stop=stop)
        return done.text


def _sum(tokens: Sequence[TokenLogprob]) -> tuple[float, bool]:
    """The log-probability of all tokens together, and whether each is the most likely one."""
    return math.fsum(item.logprob for item in tokens), all(item.top[0][0] == item.token_id for item in tokens)


def _device(request: str | None) -> str:
    """lm-eval asks for cuda:0 when no device is named, even without a GPU."""
    return request if request and torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found,import-untyped,unused-ignore]

    cli_evaluate()
