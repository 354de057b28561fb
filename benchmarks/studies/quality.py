"""The cost of each method in quality, and its savings: one model, held-out documents, bytes and decoding speed.

`calibrate` writes a directory for every method, as a user would. The directories and figures stay below `out`, and a
second call makes and measures only those that are missing. All models, including peers (quality_peers.py), are loaded
as they are served, and compared with the model in BF16 document by document (documents.py). The speed is that of the
engine at batch 1; the models are timed one after the other.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from annotated_types import Ge
from pydantic import TypeAdapter

from benchmarks.studies.documents import Interval, Model, by_document, compared, intervals, of_decoder
from benchmarks.studies.quality_chart import chart
from benchmarks.studies.quality_peers import Program, running
from fp8serve.bench import engine
from fp8serve.bench.options import Checked
from fp8serve.calibration.data import PASSAGES, Sample, load_samples
from fp8serve.calibration.options import SHIPPED, CalibrationOptions, Files, ScalingOptions
from fp8serve.calibration.pipeline import calibrate
from fp8serve.commands.bench import measured, publish, show, writable
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.errors import JobError, ModelError
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.storage.files import write_json
from fp8serve.model.storage.shards import open_shards
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.options import About, check
from fp8serve.terminal import AsJson, print_table
from fp8serve.terminal import Model as ModelArgument

METHODS: dict[str, dict[str, Any]] = {
    "static": {},
    "static-gptq": {"rounding": "gptq"},
    "static-heal": {"rounding": "gptq", "heal": 100},
    "static-mixed": {"rounding": "gptq", "target_kl": 0.015},
    "current": {"name": "current"},
    "rowwise": {"name": "rowwise"},
    "rowwise-gptq": {"name": "rowwise", "rounding": "gptq"},
    "block": {"name": "block"},
    "block-gptq": {"name": "block", "rounding": "gptq"},
    "w8a16": {"name": "w8a16"},
    "w8a16-gptq": {"name": "w8a16", "rounding": "gptq"},
    "mxfp8": {"name": "mxfp8"},
    "mxfp8-gptq": {"name": "mxfp8", "rounding": "gptq"},
    "nvfp4-w4a16": {"name": "nvfp4-w4a16"},
    "nvfp4-w4a16-46": {"name": "nvfp4-w4a16", "four_over_six": True},
    "nvfp4-w4a16-gptq": {"name": "nvfp4-w4a16", "rounding": "gptq"},
    "nvfp4-w4a16-gptq-46": {"name": "nvfp4-w4a16", "rounding": "gptq", "four_over_six": True},
    "mxfp4-w4a16": {"name": "mxfp4-w4a16"},
    "mxfp4-w4a16-gptq": {"name": "mxfp4-w4a16", "rounding": "gptq"},
}


@dataclass(frozen=True)
class QualityOptions(Checked):
    methods: Annotated[tuple[str, ...], About("Method to measure.", flag="--method")] = (
        "static",
        "static-gptq",
        "rowwise",
        "rowwise-gptq",
        "block",
        "block-gptq",
        "w8a16",
        "w8a16-gptq",
    )
    peers: Annotated[
        tuple[str, ...],
        About("NAME=DIRECTORY of FP8 weights, or NAME=COMMAND that measures itself.", flag="--peer", unset="none"),
    ] = ()
    data: Annotated[Files | None, About("File to calibrate on.", unset=SHIPPED, metavar="PATH")] = None
    holdout: Annotated[Files | None, About("File to measure on.", unset="a quarter of these", metavar="PATH")] = None
    samples: Annotated[int, Ge(1), About("Sequences to calibrate on.")] = 128
    measured: Annotated[int, Ge(2), About("Sequences to measure on.", flag="--measured")] = 64
    seq_len: Annotated[int, Ge(2), About("Longest sequence, in tokens.")] = 512
    new: Annotated[int, Ge(0), About("Tokens decoded to measure the speed; 0: speed is not measured.")] = 64
    seed: Annotated[int, About("Seed of the choice of samples.")] = 0

    def __post_init__(self) -> None:
        check(self, JobError)
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise JobError(f"There is no method {unknown[0]!r}; choose from {', '.join(METHODS)}.")
        if bool(self.data) != bool(self.holdout):
            raise JobError("Give both --data and --holdout, or neither: what is measured must not be calibrated on.")


Progress = Callable[[str, int, int], None]  # (what, done, in all)
REFERENCE = "bf16"
PROMPT = 128  # tokens before those whose speed is measured


@dataclass(frozen=True)
class Row:
    """One model beside the reference."""

    name: str
    bytes: int  # of the weights in their files
    figures: Mapping[str, Interval]
    tokens_per_second: float | None = None


def study(model: Path, out: Path, settings: QualityOptions, report: Progress) -> dict[str, Any]:
    """Returns a row for the reference, every method and every peer; `model` is a directory in high precision.

    JobError: `out` holds results of other settings, or a peer fails. ModelError, DataError: an input cannot be used.
    """
    peers = dict(map(_parse_peer, settings.peers))
    out.mkdir(parents=True, exist_ok=True)
    _same_settings(out / "settings.json", model, settings)
    run = _Study(model, out, settings, report, *_texts(out, settings))
    samples = run.samples()
    documents, reference = by_document(samples), of_decoder(load_servable(model, "bf16"))
    rows = [run.cached_row(REFERENCE, "", lambda: Row(REFERENCE, _bytes(model), {}, run.speed(model, "bf16")))]
    for name, place in {**dict.fromkeys(settings.methods, ""), **peers}.items():

        def row(name: str = name, place: str = place) -> Row:
            with run.opened(name, place) as (read, size, speed):
                tallies = compared(documents, read, reference, lambda completed, of: report(name, completed, of))
                return Row(name, size, intervals(tallies), speed())

        rows.append(run.cached_row(name, place, row))
    return {
        "model": model.name,
        "text": {"documents": len(documents), "tokens": sum(len(s.ids) for s in samples), "files": list(run.held_out)},
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
    }


@dataclass(frozen=True)
class _Study:
    """The common settings of all rows. data, held_out: files to calibrate on and to measure on."""

    model: Path
    out: Path
    settings: QualityOptions
    report: Progress
    data: tuple[str, ...]
    held_out: tuple[str, ...]

    def cached_row(self, name: str, place: str, make: Callable[[], Row]) -> Row:
        """Returns the row that an earlier call wrote, or makes and writes it."""
        file = self.out / "rows" / f"{name.replace('/', '_')}.json"
        if file.exists() and (entry := json.loads(file.read_text(encoding="utf-8")))["of"] == self._of(name, place):
            return TypeAdapter(Row).validate_python(entry["row"])
        row = make()
        file.parent.mkdir(exist_ok=True)
        write_json(file, {"of": self._of(name, place), "row": asdict(row)})
        return row

    def _of(self, name: str, place: str) -> dict[str, Any]:
        """The key of a row. Weights that were written again have another key; the key of a program is its command."""
        directory = self.model if name == REFERENCE else Path(place or self.out / name)
        files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(directory.glob("*.safetensors"))]
        return {"place": place, "new": self.settings.new, "files": [list(file) for file in files]}

    @contextmanager
    def opened(self, name: str, place: str) -> Iterator[tuple[Model, int, Callable[[], float | None]]]:
        """(model, bytes, function for its tokens per second) of a method, or of the peer at `place`."""
        if place and not Path(place).is_dir():
            with running(name, place) as peer:
                yield peer, peer.bytes, lambda: self._speed_of(peer)
            return
        directory = Path(place) if place else self._calibrated(name)
        yield of_decoder(load_servable(directory)), _bytes(directory), lambda: self.speed(directory)

    def _calibrated(self, name: str) -> Path:
        """Returns the directory of a method; calibrates if it does not exist yet."""
        directory, settings, options_of_method = self.out / name, self.settings, METHODS[name]
        if not (directory / "calibration.json").exists():
            shutil.rmtree(directory, ignore_errors=True)
            self.report(f"{name}: calibrate", 0, 1)
            calibration_fields = CalibrationOptions.__dataclass_fields__
            scaling = ScalingOptions(**{k: v for k, v in options_of_method.items() if k not in calibration_fields})
            options: dict[str, Any] = {k: v for k, v in options_of_method.items() if k in calibration_fields}
            options |= {"data": self.data, "holdout": self.held_out, "samples": settings.samples}
            options |= {"seq_len": settings.seq_len, "seed": settings.seed, "generated_samples": 0}
            calibrate(self.model, out=directory, recipe=scaling.recipe, **options)
        return directory

    def samples(self) -> list[Sample]:
        """Returns the documents that are measured."""
        vocabulary = json.loads((self.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        tokenizer, settings = Tokenizer.from_dir(self.model), self.settings
        return load_samples(
            self.held_out, tokenizer, vocabulary, count=settings.measured, seq_len=settings.seq_len, seed=settings.seed
        )

    def speed(self, directory: Path, recipe: str = "stored") -> float | None:
        """Tokens per second of the engine at batch 1."""
        if not self.settings.new:
            return None
        result = engine.measure_engine(
            directory, lambda *_: None, batches=(1,), prompt=PROMPT, new=self.settings.new, recipe=recipe
        )
        return float(result["decode"][0]["tokens_per_second"])

    def _speed_of(self, peer: Program) -> float | None:
        if not self.settings.new:
            return None
        return peer.tokens_per_second(list(max((s.ids for s in self.samples()), key=len)[:PROMPT]), self.settings.new)


def _same_settings(file: Path, model: Path, settings: QualityOptions) -> None:
    """Raises JobError if `out` was begun with other settings. Methods and peers may be added from call to call."""
    now = {k: v for k, v in asdict(settings).items() if k not in ("methods", "peers", "new")} | {"model": str(model)}
    now = json.loads(json.dumps(now))
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else now
    if changed := [key for key in now if before.get(key) != now[key]]:
        key = changed[0]
        raise JobError(
            f"{file.parent} holds results of other settings ({key} was {before.get(key)}, now {now[key]}); "
            "use another directory."
        )
    file.write_text(json.dumps(now, indent=2), encoding="utf-8")


def _texts(out: Path, settings: QualityOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files to calibrate on and files to measure on: those that were named, or the shipped passages in two parts."""
    if settings.data and settings.holdout:
        return settings.data, settings.holdout
    lines = PASSAGES.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = {"calibrate.jsonl": [x for i, x in enumerate(lines) if i % 4], "held-out.jsonl": lines[::4]}
    for name, part in parts.items():
        (out / name).write_text("".join(part), encoding="utf-8")
    return (str(out / "calibrate.jsonl"),), (str(out / "held-out.jsonl"),)


def _parse_peer(peer: str) -> tuple[str, str]:
    """Returns (name, directory or command)."""
    name, _, place = peer.partition("=")
    if not name or not place:
        raise JobError(f"A peer is NAME=DIRECTORY or NAME=COMMAND, not {peer!r}.")
    return name, place


def _bytes(directory: Path) -> int:
    shards = open_shards(directory)
    files = {entry.file for entry in shards.entries.values()}
    if not files:
        raise ModelError(f"{directory} holds no weights.")
    return sum(file.stat().st_size for file in files)


@with_options()
def command(
    model: ModelArgument,
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for the models, the figures and the picture; continues if it exists.",
            file_okay=False,
            callback=writable,
        ),
    ],
    options: OptionValues[QualityOptions],
    json: AsJson = False,
) -> None:
    """Measure what every method of calibration costs MODEL, and what it saves.

    Each method's directory is made below --out, or found there. All are compared with MODEL in BF16 on held-out
    documents; the intervals contain 95 % of the results from resampled documents. Peers are measured on the same
    documents in the same way.

    
    Examples:
      python -m benchmarks.studies quality smollm2 --out quality
      python -m benchmarks.studies quality smollm2 --out quality --method static --peer "llm-compressor=./their-fp8"
    """
    from fp8serve.hub import find_model

    directory, settings = find_model(model), options()
    figures = measured("Quality", lambda report: study(directory, out, settings, report))
    peers = [peer.partition("=")[0] for peer in settings.peers]
    show(publish("quality", figures, out, lambda result: {"methods": chart(result, peers)}), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    text = result["text"]
    print(f"{result['model']}, {text['documents']} held-out documents, {text['tokens']:,} tokens\n")
    rows = [
        (row["name"], *(_interval(row["figures"].get(kind), template) for kind, template in KINDS.items()),
         f"{row['bytes'] / 1e6:.1f}", "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}")
        for row in result["rows"]
    ]  # fmt: skip
    print_table(("model", "KL, nats", "perplexity, %", "same top token", "weights, MB", "tokens/s"), rows)


KINDS = {"kl": "{:.4f}", "perplexity_percent": "{:+.2f}", "top1": "{:.3f}"}


def _interval(interval: Mapping[str, float] | None, template: str) -> str:
    if interval is None:
        return ""
    value, low, high = (template.format(interval[k]) for k in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
