"""The work of a user over HTTP on a device: python -m benchmarks.gpu_server PART DEVICE OUT

    load      a Llama of 1.1 billion parameters with random weights: seconds of calibration and start; tokens/s, TTFT
              and TPOT at 1, 16, 64 and 128 streams of 256 + 64 tokens, sent by four processes; processor time of the
              server process and of the engine process for each generated token
    job       the stages of `fp8serve demo`: calibrate, serve, fine-tune, activate, and serve the result again
    features  with an FP8 KV cache: an answer by a JSON schema, the same tokens with and without speculative tokens, and
              an adapter that is trained and activated beside the model

The models need the weights or the tokenizer of SmolLM2 (`make weights`). OUT is a JSON file that is written after every
row. On the device "cpu", `load` and `features` take a small random model; their figures mean nothing.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.front_time import ProcessorTime
from fp8serve.bench import serve
from fp8serve.bench.options import Load
from fp8serve.demos import answer, training_rows, wait_for_job
from fp8serve.demos.runs import FACTS, OnSmolLM2
from fp8serve.model.gguf import smollm2
from fp8serve.running import RunningServer

CLIENTS, PROMPT, NEW = 4, 256, 64
STREAMS = {"cuda": (1, 16, 64, 128), "cpu": (1, 4)}
SIZES = {
    "cuda": {"hidden_size": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "intermediate_size": 5632},
    "cpu": {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 256},
}
SAMPLES, EPOCHS = {"cuda": 64, "cpu": 2}, {"cuda": 16, "cpu": 1}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}
Row = dict[str, Any]


class Rows:
    """The rows of a part, which are in the file after each `add`."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[Row]()

    def add(self, what: str, **figures: Any) -> None:
        self.rows.append({"what": what, **figures})
        self.path.write_text(json.dumps({"rows": self.rows}, indent=1) + "\n")
        print(self.rows[-1], flush=True)

    @contextmanager
    def timed(self, what: str) -> Iterator[Row]:
        """Adds a row with the seconds of the block and the figures that the block puts into the yielded dict."""
        figures, begin = Row(), time.monotonic()
        yield figures
        self.add(what, seconds=round(time.monotonic() - begin, 2), **figures)


# -- load --------------------------------------------------------------------------------------------------------------


def write_model(out: Path, device: str) -> Path:
    """Writes a model with random weights and SmolLM2's tokenizer, so that most of its tokens are text."""
    from fp8serve.model.storage.files import write_json
    from fp8serve.model.storage.shards import save_tensors
    from fp8serve.train.scratch import llama_config, random_weights

    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((smollm2(print) / name).read_bytes())
    end = {"bos_token_id": 1, "eos_token_id": 2}
    write_json(out / "config.json", llama_config(**SIZES[device], vocab_size=49152, context=2048) | end)
    save_tensors(out / "model.safetensors", random_weights(out, seed=0), {"format": "pt"})
    return out


def send_share(url: str, streams: int, requests: int, seed: int) -> Row:
    """Sends one client's share of the requests."""
    options = {"num_prompts": requests, "max_concurrency": streams, "input_len": PROMPT, "output_len": NEW}
    return serve.measure(url, Load(**options, seed=seed), lambda *_: None)  # type: ignore[arg-type]


def engine_pid(server: RunningServer) -> int:
    """Returns the child of the server that has used the most processor time."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return max(map(int, children), key=lambda pid: ProcessorTime.of(pid).total)


def load(device: str, folder: Path, rows: Rows) -> None:
    model, calibrated = write_model(folder / "random", device), folder / "calibrated"
    with rows.timed("calibrate"):
        calibrate(model, calibrated, device, samples=8, seq_len=64)
    begin, options = time.monotonic(), ["--device", device, "--data-dir", str(folder / "data")]
    with (
        RunningServer(calibrated, options, log=folder / "server.log") as server,
        multiprocessing.get_context("spawn").Pool(CLIENTS) as clients,
    ):
        rows.add(
            "start", seconds=round(time.monotonic() - begin, 2), phases=server.get("/info")["engine"]["start_seconds"]
        )
        processes = {"server": server.pid, "engine": engine_pid(server)}
        for streams in STREAMS[device]:
            active = min(CLIENTS, streams)
            share, requests = streams // active, max(4, 4 * streams // active)
            before = {name: ProcessorTime.of(pid) for name, pid in processes.items()}
            figures_of = clients.starmap(send_share, [(server.url, share, requests, seed) for seed in range(active)])
            tokens = sum(figures["output_tokens"] for figures in figures_of)
            rows.add(
                f"{streams} streams",
                **{"tokens/s": sum(figures["output_throughput"] for figures in figures_of)},
                **{f"{name} ms": figures_of[0][f"{name}_ms"]["median"] for name in ("ttft", "tpot")},
                failed=sum(figures["failed"] for figures in figures_of),
                **{
                    f"{name} us a token": 1e6 * ProcessorTime.of(pid).since(before[name]).total / tokens
                    for name, pid in processes.items()
                },
            )


def calibrate(model: Path, out: Path, device: str, **options: Any) -> None:
    from fp8serve.calibration.pipeline import calibrate
    from fp8serve.fp8.recipe import DelayedScaling

    calibrate(model, out=out, recipe=DelayedScaling(), device=device, **options)


# -- job ---------------------------------------------------------------------------------------------------------------


def job(device: str, folder: Path, rows: Rows) -> None:
    demo = OnSmolLM2("make gpu", folder / "demo", effort=1.0 if device == "cuda" else 0.1, device=device)
    results = demo.run()
    for stage, figures in results.items():
        if isinstance(figures, dict) and "seconds" in figures:
            rows.add(stage, **{name: value for name, value in figures.items() if not isinstance(value, dict)})


# -- features ----------------------------------------------------------------------------------------------------------


def ask(server: RunningServer, question: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0.0}
    response = server.post("/v1/chat/completions", body | {"model": "demo"} | fields)
    return str(response["choices"][0]["message"]["content"])


def features(device: str, folder: Path, rows: Rows) -> None:
    calibrated, question = folder / "calibrated", "Write a haiku about rain, then the same haiku again."
    with rows.timed("calibrate with KV scales"):
        model = smollm2(print) if device == "cuda" else write_model(folder / "random", device)
        calibrate(model, calibrated, device, samples=SAMPLES[device], seq_len=64, kv_cache=True)
    options = ["--device", device, "--kv-cache-dtype", "fp8", "--served-model-name", "demo"]
    with RunningServer(calibrated, [*options, "--speculative-tokens", "4"], log=folder / "drafts.log") as server:
        drafted = ask(server, question)
    options += ["--train-on", "share", "--data-dir", str(folder / "data")]
    with RunningServer(calibrated, options, log=folder / "server.log") as server:
        rows.add("speculative tokens", same=ask(server, question) == drafted)
        schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
        text = ask(server, "What is the largest city of France?", response_format=schema)
        rows.add("JSON schema", answer=text, valid=set(json.loads(text)) == set(SCHEMA["required"]))
        body = {"data": training_rows(FACTS), "lora_rank": 16, "batch_size": 4, "epochs": EPOCHS[device]}
        with rows.timed("adapter"):
            job = wait_for_job(server, server.post("/finetune", body | {"learning_rate": 1e-3}), lambda *_: None)
        with rows.timed("adapter, activated"):
            server.post(f"/finetune/{job['id']}/activate")
        num_correct = sum(answer(server, question) == fact for question, fact in FACTS.items())
        rows.add("adapter, facts learnt", learnt=num_correct, facts=len(FACTS))


PARTS: dict[str, Callable[[str, Path, Rows], None]] = {"load": load, "job": job, "features": features}


def main(arguments: list[str]) -> int:
    if len(arguments) != 3 or arguments[0] not in PARTS or arguments[1] not in STREAMS:
        print(f"usage: python -m benchmarks.gpu_server {'|'.join(PARTS)} {'|'.join(STREAMS)} OUT", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fp8serve-gpu-") as folder:
        part, device, out = arguments
        PARTS[part](device, Path(folder), Rows(Path(out)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
