"""The engine generates text for requests with continuous batching. Each step advances every running request by a token
or by a chunk of its prompt, and returns outputs.

    step():  schedule -> launch: run, sample -> land: read and process the sampled tokens

On a GPU, a step is launched before the previous one lands (flights.py).

The engine is single-threaded. `worker.py` runs it in a process of its own, and `generate` runs it in the caller's.

On a CPU, a completion depends on its request alone: no bit of it changes with scheduling, other requests, cached
prefixes, preemption or drafts. On a GPU, this holds for attention and sampling, but not for matrix products, which
choose their kernel by the number of rows (docs/cuda.md).
"""

import math
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8serve.engine import loading
from fp8serve.engine.draft_model import DraftModel, ModelDrafter
from fp8serve.engine.drafting import Drafter, sequences_to_sample
from fp8serve.engine.flights import Flight
from fp8serve.engine.grammar import Mask, Masks, validate
from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.options import LOST_SECONDS, EngineOptions
from fp8serve.engine.output import Completion, FinishReason, RequestOutput, TokenLogprob
from fp8serve.engine.request import Request
from fp8serve.engine.sampler import NOT_FINITE, SamplingPlan, launch_sampling
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.scheduler import Scheduler, StepWork, Work
from fp8serve.engine.sequence import Sequence, Status, StepOutput, to_request_output
from fp8serve.engine.task import check_generates
from fp8serve.engine.text import TextStream
from fp8serve.engine.trainer_weights import digest, stage_tensors
from fp8serve.engine.weight_receiver import WeightReceiver
from fp8serve.engine.weights import replace_weights
from fp8serve.errors import IncompleteError, MachineError, RequestError
from fp8serve.model.building import Model
from fp8serve.model.formats.scales import save_scales
from fp8serve.model.text.tokenizer import missing_tokenizer_message
from fp8serve.options import known_fields
from fp8serve.processes import Phases

if TYPE_CHECKING:
    from fp8serve.engine.rank_group import OnLoss, RankGroup

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The bounds of the histogram of tokens per step in `Engine.stats`."""


class Engine:
    """A model that is loaded from its directory and generates text.

    Raises ModelError, ScalesError or RecipeError if the model cannot be loaded, RequestError for options that do not
    suit the model, and MachineError if the KV cache does not fit in memory.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        model: Model | None = None,
        on_loss: "OnLoss | None" = None,
        lost_seconds: float = LOST_SECONDS,
        **options: Any,
    ) -> None:
        """Loads a model.

        Args:
            model: a network with weights, as `load_servable` returns it. The engine takes ownership of it and reads
                only the configuration and the tokenizer from `model_dir`.
            on_loss: is called in another thread if the processes of `tensor_parallel` can no longer continue.
            lost_seconds: after which one of these processes is lost if it gives no sign of life.
            options: the fields of EngineOptions. `recipe` may also be a Recipe, and `scales` a Path.
        """
        start_time = time.monotonic()
        self.phases = Phases()
        self._group: RankGroup | None = None
        engine_options = EngineOptions.of(options)
        if engine_options.tensor_parallel > 1:
            engine_options = self._start_ranks(Path(model_dir), engine_options, model, on_loss, lost_seconds)
        errors = nullcontext() if self._group is None else self._group.errors()
        try:
            with errors:
                self.loaded = loading.load(Path(model_dir), engine_options, model, self.phases, self._group)
        except BaseException:
            self.close()
            raise
        self.options = self.loaded.options
        self.tokenizer = self.loaded.tokenizer
        self.eos_ids = self.loaded.config.eos_token_ids
        self.limits = self.loaded.limits()
        self.adapters = self.loaded.runner.adapters
        pool = BlockPool(self.limits.num_blocks, self.options.block_size)
        self.scheduler = Scheduler(pool, self.options.num_seqs, self.options.step_tokens, self.options.prefill_tokens)
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.restore(pool, self.loaded.runner)
        draft, config = self.loaded.draft, self.loaded.config
        self._draft_model = None if draft is None else DraftModel(draft, pool, self.options, config)
        self._live: dict[str, Sequence] = {}  # waiting and running requests, by request id
        self._masks = Masks(self.limits.vocab_size)
        self._finished: Counter[FinishReason] = Counter()
        self._totals: Counter[str] = Counter()
        self._accepted = [0] * self.options.drafted_tokens  # number of accepted tokens at each position of a draft
        self._step_sizes = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._ids = count()
        self._step_seconds = 0.0  # duration of the last step
        self._plan: SamplingPlan | None = None  # of the last step
        self._flight: Flight | None = None  # the launched step that has not landed
        self._outputs: list[StepOutput] = []  # of the current call of `run_step`
        # Whether a step is launched before the previous one lands. Drafts need the values of all previous tokens.
        # Ranks of a group get the values with each step.
        is_on_gpu = self.loaded.runner.device.type == "cuda"
        self.async_scheduling = is_on_gpu and not self.options.drafted_tokens and self._group is None
        self.weights_version = 0  # how often the weights were replaced
        self._staged: loading.StagedWeights | None = None
        self.receiver = WeightReceiver(self.loaded.runner.device)
        self._load_seconds = time.monotonic() - start_time

    def _start_ranks(
        self,
        model_dir: Path,
        options: EngineOptions,
        model: Model | None,
        on_loss: "OnLoss | None",
        lost_seconds: float,
    ) -> EngineOptions:
        """Connects with the other ranks and returns the options of this one. On other ranks than 0, which torchrun has
        started, follows rank 0 and never returns."""
        from fp8serve.engine import rank_processes  # here, because it imports DTensor, which takes a second

        if model is not None:
            raise RequestError(
                "An engine with tensor_parallel loads its weights itself; leave out model or tensor_parallel."
            )
        check_generates(model_dir, options.task)
        self._group, options = rank_processes.start(model_dir, options, on_loss, lost_seconds)
        if not self._group.ranks.is_first:
            from fp8serve.engine.follower import follow

            follow(self._group, model_dir, options)
        weakref.finalize(self, self._group.close)
        return options

    def close(self) -> None:
        """Ends the other processes of an engine with `tensor_parallel`. Otherwise there is nothing to end."""
        if self._group is not None:
            self._group.close()

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
        seq.stop_ids = frozenset(params.stop_token_ids + (() if params.ignore_eos else self.eos_ids))
        seq.matcher = self.loaded.grammars.matcher(params)
        seq.ban = self.loaded.bans.ban(params.bad_words)
        if max_drafted := 0 if seq.matcher or seq.ban else self.options.drafted_tokens:
            seq.drafter = ModelDrafter(self._draft_model, seq) if self._draft_model else Drafter(max_drafted)
        seq.adapter = self.adapters.acquire(request.adapter)
        seq.text = TextStream(token_stream, params)
        self._live[request.request_id] = seq
        self.scheduler.add(seq)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now and frees its blocks. Returns its last output, or None if there is no such request."""
        if request_id not in self._live:
            return None
        seq = self._live[request_id]
        return self._end(seq, "abort", seq.text.flush())

    def abort_all(self) -> list[RequestOutput]:
        """Ends all requests and returns their last outputs."""
        return [output for request_id in list(self._live) if (output := self.abort(request_id))]

    def suspend(self) -> list[StepOutput]:
        """Sets all requests of clients aside until `resume`: they keep their tokens and lose their blocks, so they
        continue with the weights that serve then. Returns the outputs of the step that was in flight."""
        self._outputs = []
        self._land()
        self.scheduler.suspend()
        return self._outputs

    def resume(self) -> None:
        """Continues the requests that `suspend` has set aside."""
        self.scheduler.resume()

    def abort_requests_of_clients(self) -> list[RequestOutput]:
        """Ends all requests except the server's own, and returns their last outputs."""
        clients = [request_id for request_id, seq in self._live.items() if not seq.is_own]
        return [output for request_id in clients if (output := self.abort(request_id))]

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Raises RequestError if requests are running."""
        if self.scheduler.running:
            running = len(self.scheduler.running)
            raise RequestError(f"{running} requests are running; the prefix cache is only reset while no request runs.")
        self._land()
        self.scheduler.pool.reset_prefix_cache()

    def pop_block_changes(self) -> list[tuple[str, str | None, Items[int], str]]:
        """Calls `BlockPool.pop_changes`, and returns hashes as hexadecimal digits: "" in ALL_REMOVED."""
        return [
            (key.hex(), None if previous is None else previous.hex(), tokens, tenant)
            for key, previous, tokens, tenant in self.scheduler.pool.pop_changes()
        ]

    def has_work(self) -> bool:
        return self.scheduler.has_work() or self._flight is not None

    def step(self) -> list[RequestOutput]:
        """Runs a step, as `run_step` does."""
        return [to_request_output(output) for output in self.run_step()]

    def run_step(self) -> list[StepOutput]:
        """Launches the next step and lands the previous one. Without `async_scheduling`, lands the step that it has
        launched. Returns an output for every token of the landed step, or an empty list if no step has landed."""
        self._outputs = []
        if self._flight is not None and self.scheduler.may_preempt():
            self._land()
        self.pack_weights(self._step_seconds)
        start_time = time.perf_counter()
        try:
            work = self.scheduler.schedule()
            flight = self._launch(work) if work else None
            self._land()
            self._flight = flight
            if not self.async_scheduling:
                self._land()
            if flight is not None and self.loaded.scale_monitor.count_tokens(flight.work.num_tokens):
                self.loaded.scale_monitor.close_window(self._rows_by_layer())
        finally:
            self._step_seconds = time.perf_counter() - start_time
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.save_if_due(self.scheduler.pool, self.loaded.runner)
        return self._outputs

    def pack_weights(self, seconds: float = math.inf) -> bool:
        """Packs weights for about `seconds`, which makes later steps faster (packing.py). Returns whether weights
        remain to be packed."""
        self.loaded.packer.pack(seconds)
        return self.loaded.packer.has_pending

    def _land(self) -> None:
        """Waits for the step in flight, if there is one, and processes its sampled tokens."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            tokens, logprobs = flight.samples.read()
        except RuntimeError as problem:  # an error of the device
            self._outputs += self._fail_all(flight.work, problem)
            return
        self._outputs += self._process_sampled(flight, tokens, logprobs)

    def _launch(self, work: StepWork) -> Flight | None:
        """Launches a step. If it samples sequences that depend on the values of all previous tokens, the previous step
        lands between the launch of the model and the launch of the sampling. Returns None if launching fails."""
        if self._draft_model is not None:
            work = StepWork(others=self._draft_model.fill(list(work)))
        rows = list(work.decodes)
        for item in work.others:
            rows += sequences_to_sample(item.seq, item.draft) if item.needs_sample else ()
        try:
            plan = self._plan_sampling(rows)
            lands_first = self._flight is not None and plan.depends_on_tokens
            mask = None if lands_first else self._start_mask(plan)
            logits = self._logits(work)
            if lands_first:
                self._land()
                mask = self._start_mask(plan)
            samples = launch_sampling(logits, plan, self.eos_ids, mask)
            if self.async_scheduling:
                self.loaded.runner.keep_samples(samples.tokens)
        except (RuntimeError, MemoryError) as problem:  # an error of the device; other batches may still succeed
            self._land()
            self._outputs += self._fail_all(work, problem)
            return None
        self._count_step(work, len(rows))
        self.scheduler.launch(work)
        return Flight(work, samples)

    def _plan_sampling(self, rows: list[Sequence]) -> SamplingPlan:
        if self._plan is None or self._plan.seqs != rows:
            self._plan = SamplingPlan(rows, self.loaded.runner.device)
        return self._plan

    def _start_mask(self, plan: SamplingPlan) -> Mask | None:
        """Starts to compute the mask of the sequences that have a grammar and have not finished."""
        if not plan.has_grammar:
            return None
        return self._masks.start([None if seq.status is Status.FINISHED else seq.matcher for seq in plan.seqs])

    def _fail_all(self, work: StepWork, problem: BaseException) -> list[RequestOutput]:
        """Ends the requests of a step that failed, except those that have ended already."""
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        seqs = [seq for seq in work.sequences if seq.status is not Status.FINISHED]
        return [self._fail(seq, f"The model failed on this batch: {reason}") for seq in seqs]

    def _count_step(self, work: StepWork, num_samples: int) -> None:
        num_tokens = work.num_tokens
        self._totals["steps"] += 1
        self._step_sizes[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        self._totals["computed"] += num_tokens
        self._totals["sampled"] += num_samples

    def _logits(self, work: StepWork) -> Tensor:
        """Runs the model and returns the logits to sample from, FP32 [samples, vocab]. Stores the log-probabilities of
        prompts in the sequences that request them."""
        if any(item.scored_positions for item in work.others):
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

        `weights` are tensors with the names that engine/weights.py describes, or a model directory, which is read with
        this engine's recipe and with the scales of that directory. The prefix cache becomes empty and is no longer
        saved to `cache_dir`. A draft model does not change. After an error, nothing has changed.

        Raises RequestError if requests are running, if adapters are loaded, or with roll_history or an FP8 KV cache,
        whose scales belong to the old weights. Raises ModelError or ScalesError if the weights belong to another model
        or cannot be used.
        """
        self._check_can_load_weights()
        tensors = weights if isinstance(weights, Mapping) else loading.read_weights(Path(weights), self.loaded)
        replace_weights(self.loaded.runner.model, tensors)
        self.loaded = self.loaded.after_replaced_weights(None if isinstance(weights, Mapping) else Path(weights))
        self.scheduler.pool.reset_prefix_cache()
        self.weights_version += 1
        return self.weights_version

    def stage_weights(self, directory: str | Path) -> None:
        """Reads the weights of another directory of the same model, and checks all of them, for `swap_weights`.

        Requests may be running. Raises RequestError if this engine's adapters or options rule out an exchange, and
        ModelError, ScalesError or MachineError if these weights cannot be used.
        """
        self.check_can_swap()
        self._staged = None  # frees the memory of weights that were staged before
        self._staged = loading.stage_weights(Path(directory), self.loaded, self.weights_version + 1)

    def stage_received_weights(self, allow_incomplete: bool = False) -> str | None:
        """Converts and checks the tensors that a trainer has sent (`receiver`), for `swap_weights`. Returns a digest of
        the new weights, or None if `allow_incomplete` and weights of the model are missing, which may still arrive.

        Raises the errors of `stage_weights`. The tensors are then dropped.
        """
        tensors = self.receiver.take()
        self.check_can_swap()
        self._staged = None  # frees the memory of weights that were staged before
        try:
            self._staged = stage_tensors(tensors, self.loaded, self.weights_version + 1)
        except IncompleteError:
            if not allow_incomplete:
                raise
            self.receiver.put_back(tensors)
            return None
        return digest(self._staged.tensors)

    def swap_weights(self) -> dict[str, Any]:
        """Exchanges the served weights and the staged ones, in place, and returns `info`.

        The replaced weights become the staged ones, so a second call undoes the first. Other tensors stay where they
        are, so CUDA graphs remain valid. The prefix cache becomes empty. After an error, nothing has changed. Raises
        RequestError if no weights are staged or requests are running.
        """
        self._finish_steps()
        self.check_can_swap()
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

    def check_can_swap(self) -> None:
        """Raises RequestError if this process does not hold all weights, or if its adapters, scales or saved cache
        belong to the served weights."""
        self._check_has_weights()
        if self.adapters.by_name:
            raise RequestError(
                "Weights cannot be exchanged while adapters are loaded, which belong to the served weights."
            )
        if self.options.roll_history:
            raise RequestError(
                "Weights cannot be exchanged with roll_history, because the scales of inputs follow the traffic."
            )
        if self.loaded.prefixes is not None:
            raise RequestError(
                "Weights cannot be exchanged with cache_dir: the saved prefix cache belongs to the served weights."
            )
        if self.options.scales is not None:
            raise RequestError(
                "Weights cannot be exchanged with the option scales: its file belongs to the served weights."
            )

    def _finish_steps(self) -> None:
        """Raises RequestError if requests are running. Lands the step in flight, whose requests were all aborted."""
        if running := len(self._live) - len(self.scheduler.suspended or ()):
            raise RequestError(f"{running} requests are running; weights can only be replaced while no request runs.")
        self._land()

    def _check_has_weights(self) -> None:
        """Raises RequestError if this process does not have all weights in memory."""
        if self._group is not None:
            raise RequestError(
                "The weights of an engine with tensor_parallel cannot be replaced; start another engine with them."
            )
        if self.loaded.streamer is not None:
            raise RequestError(
                "Weights that are read from their files in every step cannot be replaced; start another engine with "
                "the new ones."
            )

    def _check_can_load_weights(self) -> None:
        self._check_has_weights()
        self._finish_steps()
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
            "waiting": len(scheduler.waiting) + len(scheduler.suspended or ()),
            "prefilling": [seq.request_id for seq in scheduler.running if seq.first_token is None],
            "adapters": self._sequences_by_adapter(),
            "kv_blocks": pool.num_blocks,
            "kv_blocks_used": pool.num_used,
            "kv_usage": pool.num_used / pool.num_blocks,
            "steps_total": self._totals["steps"],
            "computed_tokens_total": self._totals["computed"],  # of prompts (without cached prefixes), outputs, drafts
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

    def _sequences_by_adapter(self) -> dict[str, dict[str, int]]:
        counts = {name: {"running": 0, "waiting": 0} for name in self.adapters.by_name}
        for seq in self._live.values():
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
        return self.loaded.scale_monitor.records(self._rows_by_layer())

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

    def _rows_by_layer(self) -> dict[str, int]:
        """Returns the number of rows that each FP8 layer has read in all launched steps."""
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

    def _process_sampled(
        self, flight: Flight, tokens: list[int], logprobs: Mapping[int, TokenLogprob]
    ) -> list[StepOutput]:
        """Appends the sampled tokens of a step to the sequences. Returns an output for every generated token."""
        work, outputs = flight.work, list[StepOutput]()
        self.scheduler.advance(work)
        append, finished = self._append_token, Status.FINISHED
        for row, (seq, token) in enumerate(zip(work.decodes, tokens, strict=False)):
            if seq.status is not finished:
                outputs.append(append(seq, token, logprobs.get(row) if logprobs else None))
        row = len(work.decodes)
        for item in work.others:
            end = row + item.num_samples
            if item.needs_sample and item.seq.status is not Status.FINISHED:
                outputs += self._verify_draft(item, [(tokens[i], logprobs.get(i)) for i in range(row, end)])
            row = end
        self._totals["generated"] += len(outputs)
        return outputs

    def _verify_draft(self, item: Work, sampled: list[tuple[int, TokenLogprob | None]]) -> list[StepOutput]:
        """Appends the first sampled token, and each next one if the token before it equals the drafted token."""
        seq, outputs = item.seq, [self._append_token(item.seq, *sampled[0])]
        for drafted, following in zip(item.draft, sampled[1:], strict=True):
            if seq.status is Status.FINISHED or seq.token_ids[-1] != drafted:
                break
            self.scheduler.accept_drafted_token(seq)
            outputs.append(self._append_token(seq, *following))
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

    def _append_token(self, seq: Sequence, token: int, logprob: TokenLogprob | None) -> StepOutput:
        """Appends a sampled token to its sequence, and ends the request if a stop condition is met."""
        if seq.first_token is None:
            self._totals["prompt"] += seq.num_prompt
        if token == NOT_FINITE:
            return self._fail(
                seq,
                "The model's output for this request is not finite (NaN or infinity); check its weights and scales.",
            )
        seq.token_ids.append(token)
        if seq.first_token is None:
            seq.first_token = time.monotonic()
        text = seq.text
        if token in seq.stop_ids:
            stop_reason = token if token in seq.params.stop_token_ids else None
            return self._end(seq, "stop", text.end(token), token, logprob, stop_reason)
        if seq.ban is not None:
            seq.ban.accept(token)
        if seq.matcher is not None and not seq.matcher.consume_token(token):
            return self._fail(seq, "The grammar became too complex during generation; simplify it.")
        delta, num_tokens = text.push(token), len(seq.token_ids)
        if text.failure is not None:
            return self._end(seq, "error", delta, error=text.failure)
        is_complete = seq.matcher is not None and seq.matcher.is_stopped()  # no further token is allowed
        has_max_tokens = num_tokens == seq.max_tokens
        if is_complete or has_max_tokens:
            delta += text.flush()
        if is_complete or text.stopped is not None:
            return self._end(seq, "stop", delta, token, logprob, text.stopped)
        if has_max_tokens:
            return self._end(seq, "length", delta, token, logprob)
        if logprob is None and num_tokens > seq.num_prompt + 1:
            return seq, num_tokens, token, delta
        return self._output(seq, delta, token, logprob)

    def _fail(self, seq: Sequence, message: str) -> RequestOutput:
        return self._end(seq, "error", seq.text.flush(), error=message)

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        delta: str,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        self.scheduler.finish(seq, reason)
        self.adapters.release(seq.adapter)
        self._finished[reason] += 1
        del self._live[seq.request_id]
        return self._output(seq, delta, token, logprob, stop_reason, error)

    def _output(
        self,
        seq: Sequence,
        delta: str,
        token: int | None,
        logprob: TokenLogprob | None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        num_generated = len(seq.token_ids) - seq.num_prompt
        has_timing = num_generated == 1 or seq.finish_reason is not None
        has_prompt_logprobs = num_generated == 1 and seq.params.prompt_logprobs is not None
        return RequestOutput(
            seq.request_id,
            delta,
            () if token is None else (token,),
            None if logprob is None else (logprob,),
            seq.finish_reason,
            seq.num_prompt,
            num_generated,
            seq.num_cached,
            stop_reason,
            error,
            prompt_logprobs=tuple(seq.prompt_logprobs) if has_prompt_logprobs else None,
            timing=seq.timing() if has_timing else None,
            settled_chars=() if logprob is None else (seq.text.settled_chars,),
        )


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
