"""The engine generates text for requests with continuous batching. Each step advances every running request by a token
or by a chunk of its prompt, and returns outputs.

    step():  schedule -> run -> sample -> process the sampled tokens

The engine is single-threaded. `worker.py` runs it in a process of its own, and `generate` runs it in the caller's.

On a CPU, a completion depends on its request alone: no bit of it changes with scheduling, other requests, cached
prefixes, preemption or drafts. On a GPU, this holds for attention and sampling, but not for matrix products, which
choose their kernel by the number of rows (docs/cuda.md).
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
from fp8serve.engine.draft_model import DraftModel, DraftParts, ModelDrafter
from fp8serve.engine.drafting import Drafter, sequences_to_sample
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
from fp8serve.model.text.tokenizer import missing_tokenizer_message
from fp8serve.options import known_fields
from fp8serve.processes import Phases

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The bounds of the histogram of tokens per step in `Engine.stats`."""


class Engine:
    """A model that is loaded from its directory and generates text.

    Raises ModelError, ScalesError or RecipeError if the model cannot be loaded, RequestError for options that do not
    suit the model, and MachineError if the KV cache does not fit in memory.
    """

    def __init__(self, model_dir: str | Path, *, model: Model | None = None, **options: Any) -> None:
        """Loads a model.

        Args:
            model: a network with weights, as `load_servable` returns it. The engine takes ownership of it and reads
                only the configuration and the tokenizer from `model_dir`.
            options: the fields of EngineOptions. `recipe` may also be a Recipe, and `scales` a Path.
        """
        start_time = time.monotonic()
        self.phases = Phases()
        self.loaded = loading.load(Path(model_dir), EngineOptions.of(options), model, self.phases)
        self.options = self.loaded.options
        self.tokenizer = self.loaded.tokenizer
        self.eos_ids = self.loaded.config.eos_token_ids
        self.limits = self.loaded.limits()
        self.adapters = self.loaded.runner.adapters
        pool, sizes = BlockPool(self.limits.num_blocks, self.options.block_size), self.options
        self.scheduler = Scheduler(pool, sizes.num_seqs, sizes.step_tokens, sizes.prefill_tokens)
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.restore(pool, self.loaded.runner)
        self._draft_model = None if self.loaded.draft is None else self._create_draft_model(self.loaded.draft)
        self._live: dict[str, tuple[Sequence, TextStream]] = {}  # waiting and running requests, by request id
        self._masks = Masks(self.limits.vocab_size)
        self._finished: Counter[FinishReason] = Counter()
        self._totals: Counter[str] = Counter()
        self._accepted = [0] * self.options.drafted_tokens  # number of accepted tokens at each position of a draft
        self._step_sizes = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._ids = count()
        self._step_seconds = 0.0  # duration of the last step
        self.weights_version = 0  # how often the weights were replaced
        self._staged: loading.StagedWeights | None = None
        self._load_seconds = time.monotonic() - start_time

    def add_request(self, request: Request, arrived: float | None = None) -> None:
        """Queues a request. `arrived` is the time at which it arrived, on the monotonic clock; by default now. Raises
        RequestError if the request could never run or its id is in use."""
        if request.request_id in self._live:
            raise RequestError(f"A request with the id {request.request_id!r} is still running; use another id.")
        self.limits.check(request)
        params = request.params
        token_stream = self.tokenizer.stream(params.skip_special_tokens) if self.tokenizer else None
        seq = Sequence.of(request)
        seq.arrived = seq.arrived if arrived is None else arrived
        seq.matcher = self.loaded.grammars.matcher(params)
        seq.ban = self.loaded.bans.ban(params.bad_words)
        if max_tokens := 0 if seq.matcher or seq.ban else self.options.drafted_tokens:
            seq.drafter = ModelDrafter(self._draft_model, seq) if self._draft_model else Drafter(max_tokens)
        seq.adapter = self.adapters.acquire(request.adapter)
        self._live[request.request_id] = seq, TextStream(token_stream, params)
        self.scheduler.add(seq)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now and frees its blocks. Returns its last output, or None if there is no such request."""
        if request_id not in self._live:
            return None
        seq, text = self._live[request_id]
        return self._end(seq, "abort", text.flush())

    def abort_all(self) -> list[RequestOutput]:
        """Ends all requests and returns their last outputs."""
        return [output for request_id in list(self._live) if (output := self.abort(request_id))]

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns an output for every generated token. Returns an empty list if there are no
        requests."""
        work = self.scheduler.schedule()
        if not work:
            return []
        self.pack_weights(self._step_seconds)
        start_time = time.perf_counter()
        try:
            outputs = self._compute(work if self._draft_model is None else self._draft_model.fill(work))
        finally:
            self._step_seconds = time.perf_counter() - start_time
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.save_if_due(self.scheduler.pool, self.loaded.runner)
        return outputs

    def pack_weights(self, seconds: float = math.inf) -> bool:
        """Packs weights for about `seconds`, which makes later steps faster (packing.py). Returns whether weights
        remain to be packed."""
        self.loaded.packer.pack(seconds)
        return self.loaded.packer.has_pending

    def _compute(self, work: list[Work]) -> list[RequestOutput]:
        rows = [row for item in work if item.needs_sample for row in sequences_to_sample(item.seq, item.draft)]
        mask = self._masks.start([seq.matcher for seq in rows])
        try:
            sampled = sample(self._logits(work), rows, self.eos_ids, mask)
        except (RuntimeError, MemoryError) as problem:  # an error of the device; other batches may still succeed
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            return [self._fail(item.seq, f"The model failed on this batch: {reason}") for item in work]
        return self._process_sampled(work, sampled)

    def _logits(self, work: list[Work]) -> Tensor:
        """Runs the model and returns the logits to sample from, FP32 [samples, vocab]. Stores the log-probabilities of
        prompts in the sequences that request them."""
        if any(item.scored_positions for item in work):
            logits, scores = self.loaded.runner.run_scoring(work)
            for seq, values in scores:
                seq.prompt_logprobs += values
            return logits
        return self.loaded.runner.run(work)

    def load_adapter(self, name: str, directory: str | Path) -> dict[str, Any]:
        """Loads a LoRA or DoRA adapter from a PEFT directory. Requests select it by `name`. Returns its description.

        Raises RequestError if the name is in use, ModelError if the adapter does not fit the model, and MachineError if
        memory is short.
        """
        return self.adapters.load(name, Path(directory)).view()

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. New requests cannot use it, and running requests finish with it. Raises RequestError if
        no adapter has this name."""
        self.adapters.unload(name)

    def load_weights(self, weights: str | Path | Mapping[str, Tensor]) -> int:
        """Replaces the weights by other weights of the same model, in place, and returns the new weights version.

        `weights` are tensors with the names of `engine.weights`, or a model directory, which is read with this engine's
        recipe and with the scales of that directory. The prefix cache becomes empty and is no longer saved to
        `cache_dir`. A draft model does not change. After an error, nothing has changed.

        Raises RequestError if requests are running, adapters are loaded, or an option has scales that do not suit other
        weights. Raises ModelError or ScalesError if the weights belong to another model or cannot be used.
        """
        self._check_replaceable()
        tensors = weights if isinstance(weights, Mapping) else loading.read_weights(Path(weights), self.loaded)
        replace_weights(self.loaded.runner.model, tensors)
        self.loaded = self.loaded.after_replaced_weights(None if isinstance(weights, Mapping) else Path(weights))
        self.scheduler.pool.reset_prefix_cache()
        self.weights_version += 1
        return self.weights_version

    def stage_weights(self, directory: str | Path) -> None:
        """Reads the weights of another directory of the same model, and checks all of them, for `swap_weights`.

        Requests may be running. Raises RequestError if weights cannot be exchanged with this engine's options, and
        ModelError, ScalesError or MachineError if these weights cannot.
        """
        self._check_exchangeable()
        self._staged = None  # frees the memory of weights that were staged before
        self._staged = loading.stage_weights(Path(directory), self.loaded, self.weights_version + 1)

    def swap_weights(self) -> dict[str, Any]:
        """Exchanges the served weights and the staged ones, in place, and returns `info`.

        The replaced weights are staged then, so a second call undoes the first. Other tensors stay where they are, so
        CUDA graphs remain valid. The prefix cache becomes empty. After an error, nothing has changed. Raises
        RequestError if no weights are staged or requests are running.
        """
        self._check_no_requests()
        self._check_exchangeable()
        if self._staged is None:
            raise RequestError("No weights are staged; call stage_weights first.")
        staged, self._staged = self._staged, None
        self.loaded, self._staged = loading.exchange_staged(self.loaded, staged, self.weights_version)
        self.weights_version = staged.version
        self.scheduler.pool.reset_prefix_cache()
        return self.info()

    def discard_staged_weights(self) -> None:
        """Frees the memory of the staged weights."""
        self._staged = None

    def _check_exchangeable(self) -> None:
        """Raises RequestError if the weights belong to something else that this engine keeps."""
        if self.adapters.by_name:
            raise RequestError("Adapters are loaded, which belong to the served weights.")
        if self.options.roll_history:
            raise RequestError("The scales of inputs follow the traffic (roll_history).")
        if self.loaded.prefixes is not None:
            raise RequestError("The saved prefix cache belongs to the served weights (cache_dir).")
        if self.options.scales is not None:
            raise RequestError("The scales are those of another file (scales).")

    def _check_no_requests(self) -> None:
        if self._live:
            raise RequestError(
                f"{len(self._live)} requests are running; weights can only be replaced while no request runs."
            )

    def _check_replaceable(self) -> None:
        self._check_no_requests()
        if self.adapters.by_name:
            name = next(iter(self.adapters.by_name))
            raise RequestError(f"The adapter {name!r} is loaded; unload it before the weights are replaced.")
        if self.options.roll_history:
            raise RequestError(
                "Weights cannot be replaced with roll_history, whose scales follow the traffic; serve without it."
            )
        if self.options.kv_cache_dtype == "fp8":
            raise RequestError(
                "Weights cannot be replaced with an FP8 cache, whose scales belong to the old weights; serve with "
                "kv_cache_dtype bf16."
            )

    def generate(
        self, prompts: Items[str | Items[int]], *, adapter: str | None = None, **sampling: Any
    ) -> list[Completion]:
        """Returns the completions of `prompts` (texts or lists of token ids), in the same order. `sampling` are the
        fields of SamplingParams, and `adapter` is the name of a loaded adapter.

        Raises RequestError, before anything is generated, if a prompt or an option cannot be served.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise RequestError("generate takes a list of prompts: put the prompt in a list.")
        requests = [self._create_request(prompt, sampling, adapter) for prompt in prompts]
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
        finally:  # aborts the remaining requests if an exception interrupts the loop
            for name in outputs:
                self.abort(name)
        return [_join_outputs(outputs[request.request_id]) for request in requests]

    def stats(self) -> dict[str, Any]:
        """Returns counters since the start (`*_total`) and the current state. This is cheap."""
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
            "computed_tokens_total": self._totals["computed"],  # of prompts without cached prefixes, outputs and drafts
            "prompt_tokens_total": self._totals["prompt"],  # of requests that have generated their first token
            "generated_tokens_total": self._totals["generated"],
            "drafts_total": self._totals["drafts"],
            "draft_tokens_total": self._totals["drafted"],
            "accepted_draft_tokens_total": self._totals["accepted"],
            "accepted_by_position": self._accepted,
            "draft_model_tokens_total": 0 if self._draft_model is None else self._draft_model.num_computed,
            "step_tokens": {"bounds": STEP_TOKEN_BOUNDS, "counts": self._step_sizes, "total": self._totals["computed"]},
            "preemptions_total": scheduler.num_preemptions,
            "prefix_queried_tokens_total": scheduler.num_prefix_queried,
            "prefix_hit_tokens_total": scheduler.num_prefix_hits,
            "prefix_restored_hit_tokens_total": scheduler.num_restored_hits,
            "finished_total": {reason: self._finished[reason] for reason in ("stop", "length", "abort", "error")},
            **self.loaded.scale_monitor.stats(),
        }

    def _create_draft_model(self, parts: DraftParts) -> DraftModel:
        options, pool = self.options, self.scheduler.pool
        return DraftModel(
            parts, pool, options.drafted_tokens, options.prefill_tokens, self.limits.vocab_size, self.eos_ids
        )

    def _sequences_by_adapter(self) -> dict[str, dict[str, int]]:
        """Returns the number of running and waiting sequences of every adapter."""
        counts = {name: {"running": 0, "waiting": 0} for name in self.adapters.by_name}
        for seq, _ in self._live.values():
            if seq.adapter is not None and not seq.adapter.is_unloaded:
                counts[seq.adapter.name]["running" if seq.status is Status.RUNNING else "waiting"] += 1
        return counts

    def scales(self) -> list[dict[str, Any]]:
        """Returns one record about the input of each FP8 layer. The numbers are None if the scale is dynamic.

        Since the start: amax, saturated (the number of saturated elements), saturation (their fraction), and headroom =
        448 / (amax * scale) for the current scale; with a headroom of 2, inputs twice as large would not saturate. For
        the last drift window: window_amax, window_saturation, drift = window_amax / calibrated_amax, and alarm (whether
        the drift exceeds the option drift_alarm).

        o_proj, gate_proj, up_proj and down_proj of the last decoder layer read only the tokens whose logits are needed
        (model/network/decoder.py), so their records do not cover whole prompts.
        """
        return self.loaded.scale_monitor.records(self._rows())

    def save_scales(self, path: str | Path) -> int:
        """Writes the scales that follow the traffic, with their amax histories, to `path`. Returns the number of
        scales.

        Raises RequestError if no scale follows the traffic (roll_history), ScalesError if a scale cannot be served, and
        MachineError if the file cannot be written.
        """
        checkpoint = self.loaded.scale_monitor.current_scales()
        try:
            save_scales(Path(path), checkpoint)
        except OSError as error:
            raise MachineError(f"{path} cannot be written: {error.strerror}.") from None
        return len(checkpoint.tensors)

    def save_prefixes(self) -> None:
        """Saves the prefix cache to `cache_dir`, if the options have one. Call it once, after the last request.

        Do not call it if you changed the engine's weights without `load_weights`: the cache belongs to the old weights.
        """
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.save(self.scheduler.pool, self.loaded.runner)

    def _rows(self) -> dict[str, int]:
        return self.loaded.rows(self._totals["computed"], self._totals["sampled"])

    def info(self) -> dict[str, Any]:
        """Returns the model, its options and its limits, as a JSON object."""
        adapters = [adapter.view() for adapter in self.adapters.by_name.values()]
        result = {"adapters": adapters, "weights_version": self.weights_version}
        return {**self.loaded.info(), **result, "load_seconds": round(self._load_seconds, 3)}

    def _create_request(self, prompt: str | Items[int], sampling: dict[str, Any], adapter: str | None) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(missing_tokenizer_message(self.loaded.model_dir))
            prompt = self.tokenizer.encode(prompt)
        return Request(
            f"generate-{next(self._ids)}",
            tuple(prompt),
            SamplingParams(**known_fields(SamplingParams, sampling)),
            adapter=adapter,
        )

    def _process_sampled(self, work: list[Work], sampled: list[Sampled]) -> list[RequestOutput]:
        """Counts a step and appends its sampled tokens to the sequences. Returns an output for every generated
        token."""
        sampling = [item for item in work if item.needs_sample]
        num_tokens = sum(item.count for item in work)
        self._totals["steps"] += 1
        self._step_sizes[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        self._totals["computed"] += num_tokens
        self._totals["sampled"] += len(sampled)
        self._totals["prompt"] += sum(item.seq.num_prompt for item in sampling if item.seq.num_generated == 0)
        if self.loaded.scale_monitor.ends_window(num_tokens):
            self.loaded.scale_monitor.close_window(self._rows())
        self.scheduler.advance(work)
        remaining, outputs = iter(sampled), list[RequestOutput]()
        for item in sampling:
            outputs += self._verify_draft(item, list(islice(remaining, item.num_samples)))
        self._totals["generated"] += len(outputs)
        return outputs

    def _verify_draft(self, item: Work, sampled: list[Sampled]) -> list[RequestOutput]:
        """Appends the first sampled token, and the next ones as long as the token before them equals the draft."""
        seq, outputs = item.seq, [self._append_token(item.seq, sampled[0])]
        for drafted, following in zip(item.draft, sampled[1:], strict=True):
            if seq.status is Status.FINISHED or seq.token_ids[-1] != drafted:
                break
            self.scheduler.accept_drafted_token(seq)
            outputs.append(self._append_token(seq, following))
        if item.draft and seq.drafter:
            self._count_draft(len(item.draft), len(outputs) - 1)
            seq.drafter.record(len(item.draft), len(outputs) - 1)
        return outputs

    def _count_draft(self, drafted: int, accepted: int) -> None:
        self._totals["drafts"] += 1
        self._totals["drafted"] += drafted
        self._totals["accepted"] += accepted
        for position in range(accepted):
            self._accepted[position] += 1

    def _append_token(self, seq: Sequence, sampled: Sampled) -> RequestOutput:
        """Appends a sampled token to its sequence, and ends the request if a stop condition is met."""
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
        if seq.matcher is not None and not seq.matcher.accept(token):
            return self._fail(seq, "The grammar became too complex during generation; simplify it.")
        delta = text.push(token)
        if text.failure is not None:
            return self._end(seq, "error", delta, error=text.failure)
        is_complete = seq.matcher is not None and seq.matcher.is_complete
        has_max_tokens = seq.num_generated == seq.params.max_new_tokens
        if is_complete or has_max_tokens:
            delta += text.flush()
        if is_complete or text.stopped is not None:
            return self._end(seq, "stop", delta, sampled, stop_reason=text.stopped)
        return self._end(seq, "length", delta, sampled) if has_max_tokens else self._output(seq, text, delta, sampled)

    def _fail(self, seq: Sequence, message: str) -> RequestOutput:
        return self._end(seq, "error", self._live[seq.request_id][1].flush(), error=message)

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
        self.adapters.release(seq.adapter)
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
            _prompt_logprobs(seq),
            seq.timing() if seq.num_generated == 1 or seq.finish_reason is not None else None,
            (text.settled,) if sampled and sampled.logprob else (),
        )


def _prompt_logprobs(seq: Sequence) -> tuple[TokenLogprob, ...] | None:
    """Returns the requested log-probabilities of the prompt for the first output, and None for every other output."""
    is_requested = seq.params.prompt_logprobs is not None and seq.num_generated == 1
    return tuple(seq.prompt_logprobs) if is_requested else None


def _join_outputs(outputs: list[RequestOutput]) -> Completion:
    last = outputs[-1]
    if last.finish_reason is None or last.error is not None:
        raise RequestError(last.error or "The request did not finish.")
    logprobs = [item for output in outputs for item in output.logprobs or ()]
    prompt_logprobs = outputs[0].prompt_logprobs
    return Completion(
        "".join(o.text_delta for o in outputs),
        [token for output in outputs for token in output.token_ids],
        last.finish_reason,
        logprobs or None,
        None if prompt_logprobs is None else list(prompt_logprobs),
    )
