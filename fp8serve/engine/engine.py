"""The engine: takes requests, advances each running one by a token or a chunk of its prompt per step, and returns
outputs.

    step():  schedule -> run -> sample -> postprocess

It is single-threaded and owns no process and no socket (`worker.py` does); `generate` drives it in-process. An answer
depends on the request alone: on a CPU, scheduling, neighbours, cached prefixes, preemption and drafts do not change a
bit of it (the kernels, `sampler.py` and the attention op each keep a part of that promise). On a GPU the sampler and
the attention keep it, too, but matrix products choose their kernel by the number of rows: docs/cuda.md.
"""

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import count, islice
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8serve.engine import loading
from fp8serve.engine.draft_model import DraftModel
from fp8serve.engine.drafting import Drafter, rows_of
from fp8serve.engine.grammar import Masks, validate
from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.output import Completion, FinishReason, RequestOutput, TokenLogprob
from fp8serve.engine.request import Request
from fp8serve.engine.sampler import Sampled, sample
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.scheduler import Scheduler, Work
from fp8serve.engine.sequence import Sequence, Status
from fp8serve.engine.text import TextStream
from fp8serve.engine.weights import replace_weights
from fp8serve.errors import MachineError, RequestError
from fp8serve.model.building import Model
from fp8serve.model.formats.scales import save_scales
from fp8serve.model.text.tokenizer import lacks_tokenizer
from fp8serve.options import known_fields

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step: bounds of the histogram in `Engine.stats`."""


class Engine:
    """A model directory, ready to answer.

    Raises what loading raises (ModelError, ScalesError, RecipeError), RequestError for options that the model cannot
    have and MachineError for a cache that does not fit.
    """

    def __init__(self, model_dir: str | Path, *, model: Model | None = None, **options: Any) -> None:
        """`options`: the fields of EngineOptions; `recipe` may be a Recipe, too, and `scales` a Path.

        model: a network with weights of its own, as `load_servable` makes one, which belongs to the engine from then
        on; configuration and tokenizer are still read from the directory.
        """
        started = time.monotonic()
        self.options = EngineOptions.of(options)
        self.loaded = loading.load(Path(model_dir), self.options, model)
        self.tokenizer = self.loaded.tokenizer
        self.eos_ids = self.loaded.config.eos_token_ids
        self.limits = self.loaded.limits()
        self.adapters = self.loaded.runner.adapters
        self.scheduler = _scheduler(self.options, self.limits.num_blocks)
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.restore(self.scheduler.pool, self.loaded.runner)
        self._draft = self._draft_model()
        self._live: dict[str, tuple[Sequence, TextStream]] = {}
        self._masks = Masks(self.limits.vocab_size)
        self._finished: Counter[FinishReason] = Counter()
        self._totals: Counter[str] = Counter()
        self._accepted = [0] * self.options.drafted_tokens  # drafted tokens, by their place in the draft
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._ids = count()
        self._step_seconds = 0.0  # that the last step took
        self.weights_version = 0  # how often they were replaced
        self._load_seconds = time.monotonic() - started

    def add_request(self, request: Request, arrived: float | None = None) -> None:
        """Queues `request`, which came at `arrived` on the monotonic clock. RequestError when it could never run, or
        its id is in use.
        """
        if request.request_id in self._live:
            raise RequestError(f"A request with the id {request.request_id!r} is still running; use another id.")
        self.limits.check(request)
        params = request.params
        decoding = self.tokenizer.stream(params.skip_special_tokens) if self.tokenizer else None
        seq = Sequence.of(request)
        seq.arrived = seq.arrived if arrived is None else arrived
        seq.constraint = self.loaded.grammars.matcher(params)
        seq.ban = self.loaded.bans.ban(params.bad_words)
        if self.options.drafted_tokens and seq.constraint is None and seq.ban is None:
            seq.drafter = Drafter(self.options.drafted_tokens) if self._draft is None else self._draft.drafter(seq)
        seq.adapter = self.adapters.take(request.adapter)
        self._live[request.request_id] = seq, TextStream(decoding, params)
        self.scheduler.add(seq)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now and frees its blocks; its last output, or None when it is not running."""
        if request_id not in self._live:
            return None
        seq, text = self._live[request_id]
        return self._end(seq, "abort", text.flush())

    def abort_all(self) -> list[RequestOutput]:
        """Ends every request."""
        return [output for request_id in list(self._live) if (output := self.abort(request_id))]

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Runs one batch through the model, and returns the outputs of the requests that got a token. Does nothing when
        there is no request."""
        work = self.scheduler.schedule()
        if not work:
            return []
        self.pack_weights(self._step_seconds)
        began = time.perf_counter()
        try:
            outputs = self._compute(work if self._draft is None else self._draft.fill(work))
        finally:
            self._step_seconds = time.perf_counter() - began
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.save_if_due(self.scheduler.pool, self.loaded.runner)
        return outputs

    def pack_weights(self, seconds: float = math.inf) -> bool:
        """Works for about `seconds` on making later steps faster (packing.py). Returns whether something is left to
        do."""
        self.loaded.packer.pack(seconds)
        return self.loaded.packer.pending

    def _compute(self, work: list[Work]) -> list[RequestOutput]:
        rows = [row for item in work if item.samples for row in rows_of(item.seq, item.draft)]
        mask = self._masks.begin([seq.constraint for seq in rows])
        try:
            drawn = sample(self._logits(work), rows, self.eos_ids, mask)
        except (RuntimeError, MemoryError) as problem:  # of the device; the engine itself is sound
            return [self._fail(item.seq, f"The model failed on this batch: {_sentence(problem)}") for item in work]
        return self._postprocess(work, drawn)

    def _logits(self, work: list[Work]) -> Tensor:
        """FP32 [samples, vocab]; sequences that want them get the log-probabilities of their prompts."""
        if any(item.scored for item in work):
            logits, scores = self.loaded.runner.run_scoring(work)
            for seq, values in scores:
                seq.prompt_logprobs += values
            return logits
        return self.loaded.runner.run(work)

    def load_adapter(self, name: str, directory: str | Path) -> dict[str, Any]:
        """Loads a LoRA or DoRA, as peft writes one, under a name that requests may use; returns facts about it.

        RequestError: the name is in use. ModelError: it does not fit this model. MachineError: there is no room.
        """
        return self.adapters.load(name, Path(directory)).view()

    def unload_adapter(self, name: str) -> None:
        """Takes no new request for the adapter; running ones finish with it. RequestError: there is none of that
        name."""
        self.adapters.unload(name)

    def load_weights(self, weights: str | Path | Mapping[str, Tensor]) -> int:
        """Replaces the weights by others of the same model, in place, and returns their version.

        weights: tensors as `engine.weights` names them, or a model directory, which is read as this engine's own was:
        by the same recipe and with its scales. All or nothing. Nothing computed with the old weights is used
        again: the prefix cache is empty, and is no longer kept in `cache_dir`. A draft model does not change.
        RequestError: requests are running, adapters are loaded, or the options keep scales that would not fit.
        ModelError, ScalesError: the weights are not of this model, or cannot be used.
        """
        self._check_replaceable()
        tensors = weights if isinstance(weights, Mapping) else loading.weights_of(Path(weights), self.loaded)
        replace_weights(self.loaded.runner.model, tensors)
        calibrated = None if isinstance(weights, Mapping) else Path(weights)
        self.loaded = self.loaded.with_other_weights(calibrated)
        self.scheduler.pool.forget()
        self.weights_version += 1
        return self.weights_version

    def _check_replaceable(self) -> None:
        if self._live:
            raise RequestError(f"{len(self._live)} requests are running; weights are replaced between requests.")
        if self.adapters.named:
            raise RequestError(
                f"The adapter {next(iter(self.adapters.named))!r} is loaded beside these weights; unload it first."
            )
        if self.options.roll_history:
            raise RequestError(
                "Scales follow the traffic (roll_history), and other weights bring their own; serve without it."
            )
        if self.options.kv_cache_dtype == "fp8":
            raise RequestError("An FP8 cache has the scales of other keys and values; serve with kv_cache_dtype bf16.")

    def generate(
        self, prompts: Items[str | Items[int]], *, adapter: str | None = None, **sampling: Any
    ) -> list[Completion]:
        """Completions of `prompts` (texts, or lists of token ids), in their order; `sampling`: see SamplingParams.
        `adapter`: the name of one that was loaded.

        RequestError when a prompt or an option cannot be served; then nothing was generated.
        """
        requests = [self._request(prompt, sampling, adapter) for prompt in self._checked(prompts)]
        for request in requests:
            self.limits.check(request)
            validate(request.params)
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self.add_request(request)
            while any(name in self._live for name in outputs):
                for output in self.step():
                    outputs.setdefault(output.request_id, []).append(output)
        finally:  # interrupted: leave nothing running
            for name in outputs:
                self.abort(name)
        return [_completion(outputs[request.request_id]) for request in requests]

    def stats(self) -> dict[str, Any]:
        """Counters since the start (`*_total`) and the state now; cheap."""
        pool, scheduler = self.scheduler.pool, self.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "prefilling": [seq.request_id for seq in scheduler.running if seq.first_token is None],
            "adapters": self._sequences_by_adapter(),
            "kv_blocks": pool.num_blocks,
            "kv_blocks_used": pool.num_used,
            "kv_usage": pool.num_used / pool.num_blocks,
            "steps_total": self._totals["steps"],
            "computed_tokens_total": self._totals["computed"],  # prompts but cached parts, answers, drafts
            "prompt_tokens_total": self._totals["prompt"],  # of requests that got their first token
            "generated_tokens_total": self._totals["generated"],
            "drafts_total": self._totals["drafts"],
            "draft_tokens_total": self._totals["drafted"],
            "accepted_draft_tokens_total": self._totals["accepted"],  # that were part of the answer
            "accepted_by_position": self._accepted,
            "draft_model_tokens_total": 0 if self._draft is None else self._draft.num_computed,
            "step_tokens": {"bounds": STEP_SIZES, "counts": self._step_sizes, "total": self._totals["computed"]},
            "preemptions_total": scheduler.num_preemptions,
            "prefix_queried_tokens_total": scheduler.num_prefix_queried,
            "prefix_hit_tokens_total": scheduler.num_prefix_hits,
            "prefix_restored_hit_tokens_total": scheduler.num_restored_hits,
            "finished_total": {reason: self._finished[reason] for reason in ("stop", "length", "abort", "error")},
            **self.loaded.traffic.stats(),
        }

    def _draft_model(self) -> DraftModel | None:
        parts, options, pool = self.loaded.draft, self.options, self.scheduler.pool
        if parts is None:
            return None
        return DraftModel(
            parts, pool, options.drafted_tokens, options.max_prefill_tokens, self.limits.vocab_size, self.eos_ids
        )

    def _sequences_by_adapter(self) -> dict[str, dict[str, int]]:
        """For every adapter, how many sequences run and wait."""
        counts = {name: {"running": 0, "waiting": 0} for name in self.adapters.named}
        for seq, _ in self._live.values():
            if seq.adapter is not None and not seq.adapter.retired:
                counts[seq.adapter.name]["running" if seq.status is Status.RUNNING else "waiting"] += 1
        return counts

    def scales(self) -> list[dict[str, Any]]:
        """One record per FP8 layer, about its input; its numbers are None where the scale follows every input.

        Since the start: amax, saturated (elements cut off), saturation (their share), and, for the present `scale`,
        headroom = 448 / (amax * scale): 2 means that inputs twice as large would still fit. For the last window:
        window_amax, window_saturation, drift = window_amax / calibrated_amax, and whether that is beyond the alarm.

        o_proj, gate_proj, up_proj and down_proj of the last decoder layer get only the tokens whose logits are needed
        (model/network/decoder.py): their records describe these, not whole prompts.
        """
        return self.loaded.traffic.records(self._rows())

    def save_scales(self, path: str | Path) -> int:
        """Writes the scales that follow the traffic, and their histories, to the file `path`; returns their number.

        RequestError: none follows it (roll_history). ScalesError: one of them cannot be served. MachineError: the file
        cannot be written.
        """
        checkpoint = self.loaded.traffic.rolled()
        try:
            save_scales(Path(path), checkpoint)
        except OSError as error:
            raise MachineError(f"{path} cannot be written: {error.strerror}.") from None
        return len(checkpoint.tensors)

    def save_prefixes(self) -> None:
        """Writes the prefix cache to `cache_dir`, if there is one. Call it last, before the engine ends.

        Do not call it if you changed the engine's weights by hand: its cache has prefixes of the old ones.
        """
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.save(self.scheduler.pool, self.loaded.runner)

    def _rows(self) -> dict[str, int]:
        return self.loaded.rows(self._totals["computed"], self._totals["sampled"])

    def info(self) -> dict[str, Any]:
        """What runs, and with which limits."""
        adapters = [adapter.view() for adapter in self.adapters.named.values()]
        result = {"adapters": adapters, "weights_version": self.weights_version}
        return {**self.loaded.info(), **result, "load_seconds": round(self._load_seconds, 3)}

    def _checked(self, prompts: Items[str | Items[int]]) -> Items[str | Items[int]]:
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise RequestError("generate takes a list of prompts: put the prompt in a list.")
        return prompts

    def _request(self, prompt: str | Items[int], sampling: dict[str, Any], adapter: str | None) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(lacks_tokenizer(self.loaded.model_dir))
            prompt = self.tokenizer.encode(prompt)
        return Request(
            f"generate-{next(self._ids)}",
            tuple(prompt),
            SamplingParams(**known_fields(SamplingParams, sampling)),
            adapter=adapter,
        )

    def _postprocess(self, work: list[Work], drawn: list[Sampled]) -> list[RequestOutput]:
        sampling = [item for item in work if item.samples]
        self._totals["steps"] += 1
        self._step_sizes[bisect_left(STEP_SIZES, sum(item.count for item in work))] += 1
        self._totals["computed"] += sum(item.count for item in work)
        self._totals["sampled"] += len(drawn)
        self._totals["prompt"] += sum(item.seq.num_prompt for item in sampling if item.seq.num_generated == 0)
        if self.loaded.traffic.is_over(sum(item.count for item in work)):
            self.loaded.traffic.close_window(self._rows())
        self.scheduler.advance(work)
        left = iter(drawn)
        outputs = [output for item in sampling for output in self._accept_drawn(item, list(islice(left, item.drawn)))]
        self._totals["generated"] += len(outputs)
        return outputs

    def _accept_drawn(self, item: Work, drawn: list[Sampled]) -> list[RequestOutput]:
        """Accepts the token that follows, and the next ones as long as they agree with the draft."""
        seq, outputs = item.seq, [self._accept(item.seq, drawn[0])]
        for drafted, sampled in zip(item.draft, drawn[1:], strict=True):
            if seq.status is Status.FINISHED or seq.token_ids[-1] != drafted:
                break
            self.scheduler.confirm(seq)
            outputs.append(self._accept(seq, sampled))
        if item.draft and seq.drafter:
            self._count_draft(len(item.draft), len(outputs) - 1)
            seq.drafter.learn(len(item.draft), len(outputs) - 1)
        return outputs

    def _count_draft(self, drafted: int, accepted: int) -> None:
        self._totals["drafts"] += 1
        self._totals["drafted"] += drafted
        self._totals["accepted"] += accepted
        for place in range(accepted):
            self._accepted[place] += 1

    def _accept(self, seq: Sequence, sampled: Sampled) -> RequestOutput:
        """Appends a token, and ends the request where that token, its text or its number ends it."""
        token = sampled.token_id
        if token is None:
            return self._fail(
                seq,
                "The model's output for this request is not finite (NaN or infinity); check its weights and scales.",
            )
        seq.token_ids.append(token)
        if seq.num_generated == 1:
            seq.first_token = time.monotonic()
        text = self._live[seq.request_id][1]
        if token in seq.params.stop_token_ids:
            return self._end(seq, "stop", text.end(token), sampled, stop_reason=token)
        if token in self.eos_ids and not seq.params.ignore_eos:
            return self._end(seq, "stop", text.end(token), sampled)
        if seq.ban is not None:
            seq.ban.accept(token)
        if seq.constraint is not None and not seq.constraint.accept(token):
            return self._fail(seq, "The grammar became too complex to go on.")
        delta = text.push(token)
        if text.failure is not None:
            return self._end(seq, "error", delta, error=text.failure)
        complete = seq.constraint is not None and seq.constraint.complete
        full = seq.num_generated == seq.params.max_new_tokens
        if complete or full:
            delta += text.flush()
        if complete or text.stopped is not None:
            return self._end(seq, "stop", delta, sampled, stop_reason=text.stopped)
        return self._end(seq, "length", delta, sampled) if full else self._output(seq, text, delta, sampled)

    def _fail(self, seq: Sequence, sentence: str) -> RequestOutput:
        return self._end(seq, "error", self._live[seq.request_id][1].flush(), error=sentence)

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        delta: str,
        sampled: Sampled | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        self.scheduler.finish(seq, reason)
        self.adapters.give_back(seq.adapter)
        self._finished[reason] += 1
        text = self._live.pop(seq.request_id)[1]
        return self._output(seq, text, delta, sampled, stop_reason, error)

    def _output(
        self,
        seq: Sequence,
        text: TextStream,
        delta: str,
        sampled: Sampled | None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            seq.request_id,
            delta,
            (sampled.token_id,) if sampled and sampled.token_id is not None else (),
            (sampled.logprob,) if sampled and sampled.logprob else None,
            seq.finish_reason,
            seq.num_prompt,
            seq.num_generated,
            seq.num_cached,
            stop_reason,
            error,
            _of_prompt(seq),
            seq.timing() if seq.num_generated == 1 or seq.finish_reason is not None else None,
            (text.settled,) if sampled and sampled.logprob else (),
        )


def _scheduler(options: EngineOptions, num_blocks: int) -> Scheduler:
    pool = BlockPool(num_blocks, options.block_size)
    return Scheduler(pool, options.max_num_seqs, options.step_tokens, options.max_prefill_tokens)


def _of_prompt(seq: Sequence) -> tuple[TokenLogprob, ...] | None:
    """With the first output, and with no other."""
    is_requested = seq.params.prompt_logprobs is not None and seq.num_generated == 1
    return tuple(seq.prompt_logprobs) if is_requested else None


def _completion(outputs: list[RequestOutput]) -> Completion:
    last = outputs[-1]
    if last.finish_reason is None or last.error is not None:
        raise RequestError(last.error or "The request did not finish.")
    logprobs = [item for output in outputs for item in output.logprobs or ()]
    token_ids = [token for output in outputs for token in output.token_ids]
    of_prompt = outputs[0].prompt_logprobs
    return Completion(
        "".join(o.text_delta for o in outputs),
        token_ids,
        last.finish_reason,
        logprobs or None,
        None if of_prompt is None else list(of_prompt),
    )


def _sentence(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]
