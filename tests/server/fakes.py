"""An engine without a model: it answers with the prompt's own tokens, over and over, one every `delay` seconds.

It has the interface of `fp8serve.engine.client.EngineClient`, records its requests, and can be made to fail, to stall,
or to die.
"""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fp8serve.engine.client import Deliver, WriteTokens
from fp8serve.engine.output import FinishReason, RequestOutput, TokenLogprob
from fp8serve.engine.request import EngineLimits, Request
from fp8serve.errors import MachineError, ModelError, RequestError
from fp8serve.model.text.chat import ChatTemplate
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from fp8serve.server.serving.served_weights import WeightSource
from tests.patience import eventually

EOS = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_backend() -> tokenizers.Tokenizer:
    """Returns a tokenizer with one token for each byte (0-255), and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), {"eos_token": "<eos>"}, ChatTemplate(TEMPLATE, {}))


VOCABULARY = 257  # of a fake engine


class FakeEngine:
    """See the module. Each token takes `delay` seconds. The last one of a client's request waits for the file `gate`;
    the server's own requests, which have no group, do not."""

    def __init__(
        self, delay: float = 0.0, fail: str | None = None, max_model_len: int = 512, gate: str | None = None
    ) -> None:
        self.gate = None if gate is None else Path(gate)
        self.limits = EngineLimits(max_model_len=max_model_len, num_blocks=10_000, block_size=16, vocab_size=VOCABULARY)
        self.info: dict[str, Any] = {
            "device": "cpu",
            "kernels": {"quantize": "fake kernel", "scaled_mm": "fake kernel"},
            "model_dir": "/secret/place",
        }
        self.delay = delay
        self.fail = fail
        self.alive = True
        self.is_draining = False
        self.heartbeat_age = 0.0
        self.resident_bytes = 0
        self.step_seconds = 0.0
        self.killed: str | None = None
        self.running: set[str] = set()
        self.prefilling: set[str] = set()
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.closed = False
        self.rolls = False
        self.adapters: dict[str, Path] = {}
        self.bad_adapters: set[str] = set()
        self.weights: list[Path] = []
        self.calls: list[tuple[Any, ...]] = []  # of a trainer
        self.needed = {"a", "b"}  # the names of the weights
        self.received: set[str] = set()
        self.transfer_problem: Exception | None = None
        self.resumed = asyncio.Event()  # cleared while clients' requests are suspended
        self.resumed.set()
        self.aborts = False  # whether the requests that run now are aborted
        self.requests: list[Request] = []
        self.surprise = 1.0  # multiplies the log-probabilities of prompts
        self.surprised_by: set[str] = set()  # adapters that make them a hundred times as large
        self._tokenizer = byte_tokenizer()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def check(self, request: Request) -> None:
        if request.request_id in self.running:
            raise RequestError(f"A request with the id {request.request_id!r} is still running; use another id.")
        self.limits.check(request)

    def submit(self, request: Request, deliver: Deliver, write_tokens: WriteTokens | None = None) -> None:
        self.check(request)
        self._tasks[request.request_id] = asyncio.create_task(self._deliver(request, deliver, write_tokens))

    def cancel(self, request_id: str) -> None:
        if task := self._tasks.get(request_id):
            task.cancel()

    async def _deliver(self, request: Request, deliver: Deliver, write_tokens: WriteTokens | None) -> None:
        try:
            async with contextlib.aclosing(self.generate(request)) as outputs:
                async for output in outputs:
                    is_text = output.has_only_text and write_tokens is not None
                    if not (is_text and write_tokens([(*output.token_ids, output.text_delta)])):
                        deliver(output)
        except Exception as error:
            deliver(error)
        finally:
            del self._tasks[request.request_id]

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self.check(request)
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            async for output in self._outputs(request):
                yield output
            self.finished.append(request.request_id)
        finally:
            self.running.discard(request.request_id)
            if request.request_id not in self.finished:
                self.aborted.append(request.request_id)

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        prompt, params = request.prompt_token_ids, request.params
        decoder = self._tokenizer.stream()
        text, offset = "", 0
        for i in range(params.max_new_tokens):
            await asyncio.sleep(self.delay)
            if request.group and self.aborts:
                yield RequestOutput(request.request_id, finish_reason="abort", num_generated=i)
                return
            if request.group:
                await self.resumed.wait()
            if self.gate is not None and request.group and i + 1 == params.max_new_tokens:
                await eventually(self.gate.exists, "the gate")
            if not self.alive:
                raise MachineError("The engine process ended.")
            token = prompt[i % len(prompt)]
            piece = decoder.push(token)
            text += piece
            count, stop_reason = i + 1, None
            reason: FinishReason | None = "length" if i + 1 == params.max_new_tokens else None
            if hits := [s for s in params.stop if s in text]:
                end = text.index(hits[0]) + (len(hits[0]) if params.include_stop_str_in_output else 0)
                text, reason, stop_reason = text[:end], "stop", hits[0]
            logprobs = (
                None
                if params.logprobs is None
                else (TokenLogprob(token, -0.5, tuple((t, -float("inf")) for t in range(params.logprobs))),)
            )
            if self.fail is not None and i == 2:
                yield RequestOutput(request.request_id, finish_reason="error", error=self.fail)
                return
            withheld = 0 if reason else max(map(len, params.stop), default=0)
            delta = (
                text[offset : max(offset, len(text) - withheld)]
                if not reason
                else text[offset:] + ("" if stop_reason else decoder.flush())
            )
            offset += len(delta)
            of_prompt = None
            if params.prompt_logprobs is not None and i == 0:
                times = self.surprise * (100 if request.adapter in self.surprised_by else 1)
                values = [(t, -float(n) * times) for n, t in enumerate(prompt) if n]
                of_prompt = tuple(TokenLogprob(t, value, ((t, value),)) for t, value in values)
            yield RequestOutput(
                request.request_id,
                delta,
                (token,),
                logprobs,
                reason,
                len(prompt),
                count,
                0,
                stop_reason,
                None,
                of_prompt,
                settled_chars=(len(piece),) if logprobs else (),
            )
            if reason:
                return

    async def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None = None) -> list[bytes]:
        return [struct.pack("<2f", len(ids), 1.0)[: None if dimensions is None else 4 * dimensions] for ids in inputs]

    async def classify(self, inputs: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[1 / len(ids), 0.0] for ids in inputs]

    async def stats(self) -> dict[str, Any]:
        drafts = {"drafts_total": 3, "draft_tokens_total": 12, "accepted_draft_tokens_total": 7}
        prefixes = {
            "prefix_queried_tokens_total": 40,
            "prefix_hit_tokens_total": 32,
            "prefix_restored_hit_tokens_total": 8,
        }
        live = {"running": len(self.running), "waiting": 0, "kv_usage": 0.25, "preemptions_total": 0}
        live |= {"prefilling": sorted(self.prefilling)}
        return live | drafts | prefixes

    async def scales(self) -> list[dict[str, Any]]:
        numbers = {"amax": 3.0, "scale": 2.0, "headroom": 448 / 6, "saturated": 0, "saturation": 0.0}
        window = {"calibrated_amax": 4.0, "window_amax": 3.0, "window_saturation": 0.0, "drift": 0.75, "drifts": False}
        return [{"name": "model.layers.0.mlp.up_proj", "input": "stored", **numbers, **window}]

    async def save_scales(self, path: Path) -> int:
        if not self.rolls:
            raise RequestError("The scales of this server do not follow the traffic; start it with --roll-history.")
        return 1

    async def load_weights(self, directory: Path) -> int:
        if self.running:
            raise RequestError(f"{len(self.running)} requests are running; weights are replaced between requests.")
        if directory.name == "bad":
            raise ModelError(f"{directory} has another configuration.")
        self.weights.append(directory)
        self.info["weights_version"] = len(self.weights)
        return len(self.weights)

    async def stage_weights(self, directory: Path) -> None:
        raise RequestError("This engine exchanges no weights.")

    async def swap_weights(self) -> None:
        raise RequestError("No weights are staged.")

    async def discard_staged_weights(self) -> None:
        pass

    async def join_group(self, address: dict[str, Any], seconds: float) -> None:
        self.calls.append(("join_group", address, seconds))

    async def leave_group(self, name: str) -> None:
        self.calls.append(("leave_group", name))

    async def receive_weights(self, group: str, tensors: Any, packed_bytes: int | None, seconds: float) -> None:
        if self.transfer_problem is not None:
            raise self.transfer_problem
        self.calls.append(("receive_weights", group, tensors, packed_bytes, seconds))
        self.received |= {name for name, _, _ in tensors}

    async def read_shared_weights(self, name: str, tensors: Any) -> None:
        self.calls.append(("read_shared_weights", name, tensors))
        self.received |= {name for name, _, _ in tensors}

    async def discard_received_weights(self) -> None:
        self.received = set()

    async def stage_received_weights(self, allow_incomplete: bool) -> str | None:
        if not self.received >= self.needed:
            if allow_incomplete:
                return None
            raise ModelError("The update lacks the tensor b; the checkpoint is incomplete.")
        self.received = set()
        return "0123456789ab"

    async def suspend(self) -> None:
        self.calls.append(("suspend",))
        self.resumed.clear()

    async def resume(self) -> None:
        self.calls.append(("resume",))
        self.aborts = False
        self.resumed.set()

    async def abort_requests(self) -> None:
        self.aborts = True

    async def reset_prefix_cache(self) -> None:
        self.calls.append(("reset_prefix_cache",))

    async def load_adapter(self, name: str, directory: Path) -> dict[str, Any]:
        if directory.name in self.bad_adapters:
            raise ModelError(f"{directory}: the rank of q_proj is 512.")
        self.adapters[name] = directory
        return {"name": name, "method": "lora", "rank": 4, "layers": 2, "bytes": 100, "digest": "0" * 32}

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    async def drain(self, deadline: float) -> None:
        await self.close()

    async def kill(self, reason: str) -> None:
        self.killed = reason
        await self.close()

    async def close(self) -> None:
        self.closed = True
        self.alive = False


def embedding_engine() -> FakeEngine:
    """Returns a fake engine of an embedding model: it returns vectors of two numbers and generates no text."""
    engine = FakeEngine()
    engine.limits = replace(engine.limits, task="embed")
    return engine


def rolling_engine() -> FakeEngine:
    """Returns a fake engine whose scales follow the traffic, so that they can be saved."""
    engine = FakeEngine()
    engine.rolls = True
    return engine


def classifying_engine() -> FakeEngine:
    """Returns a fake engine of a classifier: it returns scores of two labels and generates no text."""
    engine = FakeEngine()
    engine.limits = replace(engine.limits, task="classify")
    engine.info["labels"] = ["good", "bad"]
    return engine


class Launcher:
    """Starts fake engines in place of engine processes, and records them.

    paused: True, or the name of a directory: all loads, or those of this directory, wait until it is False. problem: if
    set, the error of every load.
    """

    def __init__(self, make: Callable[[], FakeEngine] = FakeEngine, load_seconds: float = 0.0) -> None:
        self.make = make
        self.factories: dict[str, Callable[[], FakeEngine]] = {}  # by the directory's name, in place of `make`
        self.problems: dict[str, str] = {}  # the error of a load, by the directory's name
        self.sources: list[WeightSource] = []
        self.load_seconds = load_seconds
        self.engines: list[FakeEngine] = []
        self.problem: str | None = None
        self.paused: bool | str = False

    async def __call__(self, source: WeightSource) -> tuple[FakeEngine, TokenizerFacts]:
        await asyncio.sleep(self.load_seconds)
        while self.paused is True or self.paused == source.directory.name:
            await asyncio.sleep(0.005)
        if (problem := self.problem or self.problems.get(source.directory.name)) is not None:
            raise ModelError(problem)
        self.sources.append(source)
        self.engines.append(self.factories.get(source.directory.name, self.make)())
        return self.engines[-1], TokenizerFacts.from_tokenizer(byte_tokenizer())

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]


def model_dir(path: Path) -> Path:
    """Writes a directory that the HTTP process accepts as a model; returns its path."""
    path.mkdir(parents=True, exist_ok=True)
    sizes = {
        "vocab_size": 257,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    byte_backend().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (path / "chat_template.jinja").write_text(TEMPLATE)
    header = b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    return path
