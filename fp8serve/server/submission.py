"""From a fine-tune request to a job directory, or to a report of what the job would do.

Both `POST /finetune` and `/v1/fine_tuning/jobs` come here. Rows are parsed by the same code that calibration and the
trainer use, and `TrainConfig` checks the numbers, so a request that is accepted is one that the worker accepts. The
directory is complete before the job is in the table: a crash in between leaves a directory that nothing names, which
the next start removes.

    JOB_DIR/data.jsonl | data.txt   the rows (a hard link where they were uploaded), validation.* likewise
    JOB_DIR/job.json                TrainConfig
    JOB_DIR/out/                    checkpoints and the result
"""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.errors import DataError, Fp8ServeError, RequestError
from fp8serve.model.config import read_config
from fp8serve.model.examples import read_examples
from fp8serve.model.files import fsync
from fp8serve.server.clerks import SHORT
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.house import House
from fp8serve.server.models import Source
from fp8serve.server.protocol import Body, Metadata
from fp8serve.server.records import Job, NewJob, new_job_id
from fp8serve.server.rows import write_rows
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import check_length
from fp8serve.train.validate import validate

SEQ_LEN = 256
Count = Annotated[int, Field(ge=1, le=10**9)]
Rows = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
FileId = Annotated[str, Field(max_length=64)]
RecipeValue = bool | int | Annotated[str, Field(max_length=64)] | Annotated[list[bool], Field(max_length=3)]
Suffix = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")]


class FinetuneBody(Body):
    """`POST /finetune`: rows in `data`, or an uploaded `file_id`; every other field has the trainer's own default.

    `seq_len` left out is SEQ_LEN, or the model's whole context where that is shorter.
    """

    data: Rows | None = None
    file_id: FileId | None = None
    validation_data: Rows | None = None
    validation_file_id: FileId | None = None
    model: str | None = None
    suffix: Suffix = ""
    metadata: Metadata = Field(default_factory=dict)
    recipe: Literal["delayed", "current", "rowwise", "block", "bf16"] = "delayed"
    recipe_options: Annotated[dict[str, RecipeValue], Field(max_length=32)] = Field(default_factory=dict)
    amax_history_len: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    max_steps: Count | None = None
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 8
    accumulate: Annotated[int, Field(ge=1, le=65536)] = 1
    seq_len: Annotated[int, Field(ge=2, le=1 << 20)] | None = None
    packing: Literal["rows", "tokens"] = "rows"
    learning_rate: Annotated[float, Field(ge=1e-12, le=10)] = 2e-5
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] | None = None
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.01
    clip: Annotated[float, Field(gt=0, le=1e6)] | None = 1.0
    master_weights: Literal["model", "optimizer"] = "model"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    save_every: Count | None = None
    on_divergence: Literal["fail", "keep"] = "fail"
    keep_last: Annotated[int, Field(ge=1, le=1000)] = 2
    eval_every: Count | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.file_id is None):
            raise PydanticCustomError("one_source", "give either data (rows) or file_id")
        if self.validation_data is not None and self.validation_file_id is not None:
            raise PydanticCustomError("one_source", "give either validation_data or validation_file_id")
        return self

    def hyper_parameters(self) -> dict[str, Any]:
        """The fields of TrainConfig that a client decides."""
        renamed = {"learning_rate": "lr"}
        return {renamed.get(name, name): getattr(self, name) for name in HYPER_PARAMETERS}


HYPER_PARAMETERS = (
    "recipe",
    "recipe_options",
    "amax_history_len",
    "epochs",
    "max_steps",
    "batch_size",
    "accumulate",
    "seq_len",
    "packing",
    "learning_rate",
    "warmup_steps",
    "min_lr_ratio",
    "weight_decay",
    "clip",
    "master_weights",
    "seed",
    "save_every",
    "on_divergence",
    "keep_last",
    "eval_every",
)


def refuse_if_not_allowed(house: House) -> None:
    """Fault 409 when a job would run on the serving device and nobody said that it may; 503 while draining."""
    if house.draining.is_set():
        raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5)
    settings = house.settings
    if settings.train_on == "refuse" and settings.trains_on_serving_device:
        raise Fault(
            Code.TRAINING_REFUSED,
            f"A fine-tune job would run on {settings.device}, the device that serves, and this server was not told "
            "how to share it.",
            hint="Start it with --train-on share, with --train-on pause, or with --train-device for another device.",
        )


def training_source(house: House, model: str | None) -> Source:
    """Weights to start from: what is served now, "base", or the result of an earlier job by its model name or id."""
    served = house.models.current
    if model is None or (served is not None and model in house.models.names()):
        return served.source if served is not None else house.source("base")
    if model == "base":
        return house.source("base")
    for job in house.jobs.jobs(limit=100_000, status="succeeded"):
        if model in (job.id, job.model_id(house.models.name)):
            return house.source(job.id)
    raise Fault(Code.MODEL_NOT_FOUND, "There is no model of that name to fine-tune.", param="model")


async def submit(
    house: House, body: FinetuneBody, key: str | None, rows: Path | None = None, check_files: bool = True
) -> tuple[Job, bool]:
    """Makes a queued job; False when the idempotency `key` had made it before.

    Raises Fault. `rows` is the folder where the rows of a long request lie. `check_files=False` leaves bad rows of an
    uploaded file to the job, which then fails with them.
    """
    refuse_if_not_allowed(house)
    source = await asyncio.to_thread(training_source, house, body.model)
    job_id = new_job_id()
    try:
        mark = await asyncio.to_thread(request_hash, body, rows)
        config = await asyncio.to_thread(_place_all, house, house.trainer.dir_of(job_id), body, source, rows)
        await _check_data(house, body, config, check_files)
        job, made = await asyncio.to_thread(_enter, house, job_id, body, source, config, key, mark)
    except BaseException:
        house.trainer.discard(job_id)
        raise
    if not made:
        house.trainer.discard(job_id)
    return job, made


def _enter(
    house: House, job_id: str, body: FinetuneBody, source: Source, config: TrainConfig, key: str | None, mark: str
) -> tuple[Job, bool]:
    """The directory is whole before the table knows of it."""
    directory = house.trainer.dir_of(job_id)
    (directory / "job.json").write_text(config.to_json(), encoding="utf-8")
    for path in (directory / "job.json", directory, directory.parent):
        fsync(path)
    new = NewJob(
        base=source.model_id, source=source.key, config=_public(config), suffix=body.suffix,
        training_file=body.file_id, validation_file=body.validation_file_id, metadata=body.metadata,
    )  # fmt: skip
    return house.jobs.create(new, job_id, house.settings.limits.jobs_queued, key, mark)


def request_hash(body: Body, rows: Path | None = None) -> str:
    """Identifies a request, the rows that lie in a folder included, for its idempotency key."""
    digest = hashlib.sha256(body.model_dump_json().encode())
    for path in sorted(rows.iterdir()) if rows is not None else ():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _place_all(house: House, directory: Path, body: FinetuneBody, source: Source, rows: Path | None) -> TrainConfig:
    directory.mkdir(mode=0o700)
    spooled = {} if rows is None else {path.stem: path for path in rows.iterdir()}
    data = place(house, directory / "data", body.data, body.file_id, spooled.get("data"))
    held_out = place(
        house, directory / "validation", body.validation_data, body.validation_file_id, spooled.get("validation_data")
    )
    return make_config(house, directory, body, source, data, held_out)


def make_config(
    house: House, directory: Path, body: FinetuneBody, source: Source, data: Sequence[Path], held_out: Sequence[Path]
) -> TrainConfig:
    """Fault when the trainer would refuse the numbers."""
    try:
        model = read_config(source.directory)
        seq_len = body.seq_len or min(SEQ_LEN, model.max_position_embeddings)
        check_length(seq_len, model)
        return TrainConfig.from_dict(
            body.hyper_parameters()
            | {"model": str(source.directory.resolve()), "out": str(directory / "out"), "seq_len": seq_len}
            | {"data": [str(p) for p in data], "eval_data": [str(p) for p in held_out]}
            | {"device": house.settings.training_device}
        )
    except Fp8ServeError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error)) from None


def _public(config: TrainConfig) -> dict[str, Any]:
    """What a job shows of its configuration: no place on our disk."""
    shown = {k: v for k, v in json.loads(config.to_json()).items() if k not in ("model", "data", "eval_data", "out")}
    return shown | {"learning_rate": shown.pop("lr")}


def place(house: House, stem: Path, rows: Rows | None, file_id: str | None, spooled: Path | None = None) -> list[Path]:
    """Puts rows, the file they were `spooled` to, or an uploaded file beside the job. Nothing given: nothing placed."""
    if file_id is not None:
        source = file_path(house.data_dir, house.jobs.file(file_id).id)
        path = stem.with_suffix(source.suffix)
        _link(source, path)
        return [path]
    if rows is None:
        return []
    path = stem.with_suffix(".jsonl")
    if spooled is not None:
        spooled.rename(path)
        return [path]
    limits = house.settings.limits
    try:
        write_rows(path, rows, limits.rows, limits.row_bytes)
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param=stem.name) from None
    return [path]


def _link(source: Path, path: Path) -> None:
    """Deleting the upload later must not pull the data from under a job."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
        fsync(path)


def file_path(data_dir: Path, file_id: str) -> Path:
    """Where an upload lies. `file_id` is one that the file table holds. Fault 404 when its bytes are gone."""
    for suffix in (".jsonl", ".txt"):
        if (path := data_dir / "files" / (file_id + suffix)).exists():
            return path
    raise Fault(Code.FILE_NOT_FOUND, "The file of that id is no longer there.", param="file_id")


# -- looking at the data -----------------------------------------------------------------------------------------------


async def _check_data(house: House, body: FinetuneBody, config: TrainConfig, check_files: bool) -> None:
    """Fault 4xx naming the first row that cannot be trained on: rows of `data` are tokenized, files are parsed."""
    if body.data is not None:
        report = await _report(house, config)
        if report["bad_lines"]:
            raise Fault(Code.INVALID_PARAMETER, report["bad_lines"][0]["message"], param="data")
        if not report["ok"]:
            raise Fault(Code.INVALID_PARAMETER, "No row of data has a token to learn within seq_len.", param="data")
    elif check_files:
        await _check_rows(house, config.data, "data")
    if check_files:
        await _check_rows(house, config.eval_data, "validation_data")


async def _check_rows(house: House, files: Sequence[str], param: str) -> None:
    try:
        if _is_short(files):
            await asyncio.to_thread(read_examples, [Path(name) for name in files])
        else:
            await house.reading.look_at_rows("rows", json.dumps(list(files)).encode())
    except DataError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param=param) from None


async def _report(house: House, config: TrainConfig) -> dict[str, Any]:
    """ValidationReport as plain data."""
    if _is_short(config.data):
        text = (await asyncio.to_thread(validate, config)).to_json().encode()
    else:
        text = await house.reading.look_at_rows("dry_run", config.to_json().encode())
    report: dict[str, Any] = json.loads(text)
    return report


def _is_short(files: Sequence[str]) -> bool:
    """Whether the files can be read here; a clerk reads what is longer."""
    return sum(Path(name).stat().st_size for name in files) <= SHORT


async def dry_run(house: House, body: FinetuneBody, rows: Path | None = None) -> dict[str, Any]:
    """What the job would do: bad rows, tokens, the share that is learnt, steps, memory, one row."""
    source = await asyncio.to_thread(training_source, house, body.model)
    directory = house.trainer.dir_of(f"validate-{new_job_id()}")
    try:
        config = await asyncio.to_thread(_place_all, house, directory, body, source, rows)
        return _shown(await _report(house, config))
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def _shown(report: dict[str, Any]) -> dict[str, Any]:
    """The report without places on our disk."""
    bad_lines = [{"line": bad["line"], "message": safe_text(bad["message"])} for bad in report["bad_lines"]]
    return report | {"bad_lines": bad_lines}
