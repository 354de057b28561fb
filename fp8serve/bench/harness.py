"""Registers the engine as the model `fp8serve` of lm-eval's command line.

    python -m fp8serve.bench.harness --model fp8serve --model_args model=DIR --include_path benchmarks/tasks \\
        --tasks fp8serve_arithmetic,fp8serve_python,fp8serve_cloze

`model_args` are `model` (a directory, a GGUF file, smollm2 or a name on the hub) and options of the engine, such as
recipe=bf16. Scores are the engine's log-probabilities of prompts. They have the same bits as those of a server
(lm-eval's `local-completions`), and do not depend on the order of requests or on other requests. Needs the package
`lm-eval`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found,import-untyped,unused-ignore]
from lm_eval.api.registry import register_model  # type: ignore[import-not-found,import-untyped,unused-ignore]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found,import-untyped,unused-ignore]

from fp8serve.engine.engine import Engine
from fp8serve.errors import ModelError
from fp8serve.hub import find_model
from fp8serve.model.text.tokenizer import missing_tokenizer_message

DEFAULT_MAX_TOKENS = 256  # if a task does not specify max_gen_toks


@register_model("fp8serve")
class EngineLM(TemplateLM):  # type: ignore[misc,unused-ignore]
    """An engine with lm-eval's interface."""

    def __init__(self, model: str, batch_size: Any = None, device: str | None = None, **options: Any) -> None:
        """Loads a model. `options` are the options of the Engine. `batch_size`, which lm-eval passes, has no effect.
        Raises ModelError if the model has no tokenizer."""
        super().__init__()
        # lm-eval passes cuda:0 by default, also to a machine without a GPU
        device = device if device and torch.cuda.is_available() else "cpu"
        self.engine = Engine(find_model(model), device=device, **options)
        if self.engine.tokenizer is None:
            raise ModelError(missing_tokenizer_message(self.engine.loaded.model_dir))
        self.text_tokenizer = self.engine.tokenizer
        self.max_prompt_tokens = self.engine.limits.max_model_len - 1  # the engine generates a token after a prompt

    @property
    def eot_token_id(self) -> int:
        if not self.engine.eos_ids:
            raise ModelError("The model has no end-of-text token, which lm-eval puts before a text without context.")
        return int(self.engine.eos_ids[0])

    @property
    def tokenizer_name(self) -> str:
        return str(self.engine.loaded.model_dir)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.text_tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns, for each continuation after its context, its log-probability and whether it is the greedy one."""
        return self._score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, which is scored in windows of the model's context length."""
        return [self._score_text(request.args[0]) for request in requests]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns a completion for each request, up to a stop string. It is greedy unless the task sets do_sample."""
        return [self._complete(*request.args) for request in requests]

    def _score_text(self, text: str) -> float:
        tokens = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(tokens, self.eot_token_id, self.max_prompt_tokens - 1, context_len=1)
        return sum(score for score, _ in self._score([make_disjoint_window(window) for window in windows]))

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Scores the continuation of each pair (context, continuation). The beginning of a long context is cut off."""
        texts = [[*context, *continuation][-self.max_prompt_tokens :] for context, continuation in pairs]
        completions = self.engine.generate(texts, max_new_tokens=1, temperature=0.0, prompt_logprobs=1) if texts else []
        scores = []
        for completion, (_, continuation) in zip(completions, pairs, strict=True):
            logprobs = completion.prompt_logprobs or []
            tokens = logprobs[max(0, len(logprobs) - len(continuation)) :]
            is_greedy = all(token.top[0][0] == token.token_id for token in tokens)
            scores.append((math.fsum(token.logprob for token in tokens), is_greedy))
        return scores

    def _complete(self, context: str, arguments: dict[str, Any]) -> str:
        stop = arguments.get("until") or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        max_tokens = int(arguments.get("max_gen_toks", DEFAULT_MAX_TOKENS))
        temperature = float(arguments.get("temperature", 0.0)) if arguments.get("do_sample") else 0.0
        prompt = self.tok_encode(context)[-(self.max_prompt_tokens - max_tokens) :]
        return self.engine.generate([prompt], max_new_tokens=max_tokens, temperature=temperature, stop=stop)[0].text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found,import-untyped,unused-ignore]

    cli_evaluate()
