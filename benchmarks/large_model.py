"""Serve a model larger than the memory that the process may have: seconds of a token against the speed of the disk.

    python -m benchmarks.large_model [--gib 3] [--limit-gib 1] [--hidden 4096] [--tokens 8] [--folder DIR]

Writes a Llama of `--gib` with random weights in FP8 (a scale for each row) into a temporary directory below `--folder`,
layer by layer. Then processes of their own generate `--tokens` tokens after a prompt: first with its layers streamed
(fp8serve/engine/streaming.py), then without, by page faults. As root on a machine with memory control groups (version 1
or 2) each process, and the pages of files that it reads, are held to `--limit-gib`; the kernel kills what needs more.

Prints as JSON the bytes of the file, the speed of the disk (a sequential read with direct I/O, in parts of 4 MiB), and
for each process the seconds of the load, of the prompt and of each further token, the bytes that it streams in a step,
and the peak of memory that no file backs (RssAnon, sampled).
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.calibrate_memory import GIB, limited

CHUNK = 4 << 20


def write_model(folder: Path, gib: float, hidden: int) -> Path:
    """Writes the model directory and drops the pages of its file from the page cache."""
    import torch

    from fp8serve.model.storage.files import write_json
    from fp8serve.model.storage.shards import TensorParts, save_tensors
    from fp8serve.train.scratch import llama_config

    folder.mkdir(parents=True)
    wide, heads, vocabulary = hidden * 7 // 2, hidden // 128, 4096
    kv = 128 * max(1, heads // 4)
    linears = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    layers = max(2, round(gib * GIB / sum(rows * columns for rows, columns in linears.values())))
    config = llama_config(
        hidden_size=hidden, layers=layers, heads=heads, kv_heads=max(1, heads // 4), intermediate_size=wide,
        vocab_size=vocabulary, context=1024,
    )  # fmt: skip
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(0)

    def random_rows(rows: int, columns: int) -> TensorParts:
        def parts() -> Any:  # codes of both signs and of all exponents below that of 4
            codes = torch.randint(0, 0x48, (rows, columns), dtype=torch.uint8, generator=generator)
            yield (codes | torch.randint(0, 2, codes.shape, dtype=torch.uint8, generator=generator) << 7).view(
                torch.float8_e4m3fn
            )

        return TensorParts(torch.float8_e4m3fn, (rows, columns), parts)

    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden).bfloat16()
        for name, (rows, columns) in linears.items():
            tensors[f"{prefix}.{name}.weight"] = random_rows(rows, columns)
            tensors[f"{prefix}.{name}.weight_scale"] = torch.full((rows, 1), columns**-0.5)
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    drop_pages(folder / "model.safetensors")
    return folder


def drop_pages(path: Path) -> None:
    """Writes the file to the disk and drops its pages from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_speed(path: Path) -> float:
    """Returns the bytes per second of a sequential read without the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        buffer, position, started = mmap.mmap(-1, CHUNK), 0, time.perf_counter()
        while count := os.preadv(descriptor, [buffer], position):
            position += count
        return position / (time.perf_counter() - started)
    finally:
        os.close(descriptor)


def measure(model: Path, prompt: int, tokens: int, streams: bool) -> dict[str, Any]:
    """Generates in this process and returns the times and the peak."""
    from fp8serve.engine import loading
    from fp8serve.engine.engine import Engine

    if not streams:
        loading.create_streamer = lambda *arguments: None  # type: ignore[assignment]
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            peak.append(next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    started = time.perf_counter()
    engine = Engine(model, device="cpu", max_num_seqs=1)
    times = [time.perf_counter() - started]
    for count in (1, tokens):
        started = time.perf_counter()
        engine.generate([list(range(prompt))], temperature=0.0, max_new_tokens=count, ignore_eos=True)
        times.append(time.perf_counter() - started)
    done.set()
    sampler.join()
    return {
        "streams": streams,
        "streamed_bytes": engine.info()["streamed_bytes"],
        "load_seconds": round(times[0], 2),
        "first_prompt_seconds": round(times[1], 2),
        "token_seconds": round(times[2] / tokens, 3),
        "peak_anonymous_bytes": max(peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--limit-gib", type=float, default=1.0)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where the model is written")
    parser.add_argument("--measure", type=Path, metavar="MODEL", help="measure this model in this process, unlimited")
    parser.add_argument("--no-streaming", action="store_true", help="with --measure: read by page faults")
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.prompt, args.tokens, not args.no_streaming)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        model = write_model(Path(name) / "model", args.gib, args.hidden)
        file, results = model / "model.safetensors", []
        speed = disk_speed(file)
        command = [sys.executable, "-m", "benchmarks.large_model", "--measure", str(model)]
        command += ["--prompt", str(args.prompt), "--tokens", str(args.tokens)]
        for more in ([], ["--no-streaming"]):
            drop_pages(file)
            with limited(int(args.limit_gib * GIB)) as group:
                join = "" if group is None else str(group / "cgroup.procs")
                shell = ["sh", "-c", 'if [ -n "$0" ]; then echo $$ > "$0"; fi; exec "$@"', join, *command, *more]
                process = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=False)
            is_limited = group is not None
            results.append(json.loads(process.stdout) if process.returncode == 0 else {"status": process.returncode})
        limit = int(args.limit_gib * GIB) if is_limited else None
        sizes = {"file_bytes": file.stat().st_size, "limit_bytes": limit, "disk_bytes_per_second": round(speed)}
    print(json.dumps(sizes | {"runs": results}, indent=2))


if __name__ == "__main__":
    main()
