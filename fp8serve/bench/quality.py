"""What each method costs in quality, and what it saves: one model, held-out documents, bytes and decoding speed.

Every method's directory is made by `calibrate`, as a user would make it, and stays below `out`; a second call makes
only those that are missing. All are read as they are served, and compared with the model in BF16 document by document
(documents.py), peers among them (quality_peers.py). Speed is that of the engine at batch 1, one after the other.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8serve.bench import engine
from fp8serve.bench.documents import Interval, Model, by_document, compared, intervals, of_decoder
from fp8serve.bench.options import METHODS, QualityOptions
from fp8serve.bench.quality_peers import running
from fp8serve.calibration.data import PASSAGES, Sample, load_samples
from fp8serve.calibration.options import CalibrationOptions, ScalingOptions
from fp8serve.calibration.pipeline import calibrate
from fp8serve.errors import JobError, ModelError
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.shards import open_shards
from fp8serve.model.tokenizer import Tokenizer

Tell = Callable[[str, int, int], None]  # (what, done, in all)
REFERENCE = "bf16"
PROMPT = 128  # tokens before those whose speed is measured


@dataclass(frozen=True)
class Row:
    """One model beside the reference."""

    name: str
    bytes: int  # of the weights in their files
    figures: Mapping[str, Interval]
    tokens_per_second: float | None = None


def study(model: Path, out: Path, asked: QualityOptions, tell: Tell) -> dict[str, Any]:
    """A row for the reference, every method and every peer; `model` is a directory in high precision.

    JobError: `out` holds results of other settings, or a peer fails. ModelError, DataError: an input cannot be used.
    """
    out.mkdir(parents=True, exist_ok=True)
    _same_settings(out / "settings.json", model, asked)
    data, held_out = _texts(out, asked)
    samples = _samples(model, held_out, asked)
    documents, reference = by_document(samples), of_decoder(load_servable(model, "bf16"))
    rows = [Row(REFERENCE, _bytes(model), {}, _speed(model, asked, recipe="bf16"))]
    for name, read, size, speed in _models(model, out, data, held_out, asked, tell):
        found = compared(documents, read, reference, lambda done, of, name=name: tell(name, done, of))  # type: ignore[misc]
        rows.append(Row(name, size, intervals(found), speed))
    return {
        "model": model.name,
        "text": {"documents": len(documents), "tokens": sum(len(s.ids) for s in samples), "files": list(held_out)},
        "settings": asdict(asked),
        "rows": [asdict(row) for row in rows],
    }


def _same_settings(file: Path, model: Path, asked: QualityOptions) -> None:
    """Methods and peers may be added from call to call; what they are made of and measured on may not change."""
    here = {k: v for k, v in asdict(asked).items() if k not in ("methods", "peers", "new")} | {"model": str(model)}
    here = json.loads(json.dumps(here))
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != here:
        raise JobError(f"{file.parent} holds results of other settings; use another directory.")
    file.write_text(json.dumps(here, indent=2), encoding="utf-8")


def _texts(out: Path, asked: QualityOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files to calibrate on and files to measure on: those that were named, or the shipped passages in two parts."""
    if asked.data and asked.holdout:
        return asked.data, asked.holdout
    lines = PASSAGES.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = {"calibrate.jsonl": [x for i, x in enumerate(lines) if i % 4], "held-out.jsonl": lines[::4]}
    for name, part in parts.items():
        (out / name).write_text("".join(part), encoding="utf-8")
    return (str(out / "calibrate.jsonl"),), (str(out / "held-out.jsonl"),)


def _samples(model: Path, held_out: tuple[str, ...], asked: QualityOptions) -> list[Sample]:
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return load_samples(
        held_out, Tokenizer.from_dir(model), vocabulary, count=asked.measured, seq_len=asked.seq_len, seed=asked.seed
    )


def _models(
    model: Path, out: Path, data: tuple[str, ...], held_out: tuple[str, ...], asked: QualityOptions, tell: Tell
) -> Iterator[tuple[str, Model, int, float | None]]:
    """(name, model, bytes, tokens per second) of every method and peer; each is dropped before the next is made."""
    for name in asked.methods:
        tell(f"{name}: calibrate", 0, 1)
        directory = _calibrated(model, out / name, data, held_out, METHODS[name], asked)
        yield name, of_decoder(load_servable(directory)), _bytes(directory), _speed(directory, asked)
    for peer_name, place in map(_named, asked.peers):
        if (directory := Path(place)).is_dir():
            yield peer_name, of_decoder(load_servable(directory)), _bytes(directory), _speed(directory, asked)
        else:
            with running(peer_name, place) as peer:
                speed = peer.tokens_per_second(_prompt(model, held_out, asked), asked.new) if asked.new else None
                yield peer_name, peer, peer.bytes, speed


def _calibrated(
    model: Path, directory: Path, data: tuple[str, ...], held_out: tuple[str, ...], told: Mapping[str, Any],
    asked: QualityOptions,
) -> Path:  # fmt: skip
    """The directory of a method, made now unless it is there."""
    if not (directory / "calibration.json").exists():
        shutil.rmtree(directory, ignore_errors=True)
        options: dict[str, Any] = {"data": data, "holdout": held_out, "samples": asked.samples}
        options |= {"seq_len": asked.seq_len, "seed": asked.seed, "generated_samples": 0}
        known = CalibrationOptions.__dataclass_fields__
        scaling = ScalingOptions(**{k: v for k, v in told.items() if k not in known})
        method = {k: v for k, v in told.items() if k in known}
        calibrate(model, out=directory, recipe=scaling.recipe, **options, **method)
    return directory


def _named(peer: str) -> tuple[str, str]:
    name, _, place = peer.partition("=")
    if not name or not place:
        raise JobError(f"A peer is NAME=DIRECTORY or NAME=COMMAND, not {peer!r}.")
    return name, place


def _prompt(model: Path, held_out: tuple[str, ...], asked: QualityOptions) -> Any:
    import torch

    ids = max((s.ids for s in _samples(model, held_out, asked)), key=len)
    return torch.tensor(ids[:PROMPT])


def _bytes(directory: Path) -> int:
    shards = open_shards(directory)
    files = {entry.file for entry in shards.entries.values()}
    if not files:
        raise ModelError(f"{directory} holds no weights.")
    return sum(file.stat().st_size for file in files)


def _speed(directory: Path, asked: QualityOptions, **options: Any) -> float | None:
    """Tokens per second of the engine at batch 1."""
    if not asked.new:
        return None
    found = engine.measure(directory, lambda *_: None, batches=(1,), prompt=PROMPT, new=asked.new, **options)
    return float(found["decode"][0]["tokens_per_second"])
