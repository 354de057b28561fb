"""Creates a job's directory. The server writes these files before the job is in the database:

JOB_DIR/data.jsonl, data.csv, ...     the training rows: a hard link to the upload, or a file of the request's rows
JOB_DIR/validation.jsonl, ...         the validation rows, if there are any
JOB_DIR/job.json                      the TrainConfig

From then on only the training process writes the directory, apart from the server's exports of checkpoints:

JOB_DIR/events.jsonl                  the events, which the server copies to the database
JOB_DIR/out/                          checkpoints and the result
JOB_DIR/result.json                   the sign that the job has succeeded
JOB_DIR/worker.lock, worker.log       the lock of the process, and its output
JOB_DIR/served/step-N/                checkpoints that were exported as models (sources.py)
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from fp8serve.errors import Fp8ServeError, ModelError, RequestError, shown
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.model_config import adaptable_linear_names, select_linears
from fp8serve.model.storage.files import fsync
from fp8serve.options import http_address
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.parsing.sizes import write_rows
from fp8serve.server.schemas.bodies import Body
from fp8serve.server.schemas.finetune_bodies import FinetuneBody, Rows
from fp8serve.server.serving.served_weights import WeightSource
from fp8serve.server.settings import Settings
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import check_length
from fp8serve.train.events import check_optimizer_package

DEFAULT_SEQ_LEN = TrainConfig.seq_len
LIMIT_FIELDS = ("max_rows", "max_row_bytes", "max_data_bytes", "max_data_memory")
PRIVATE_FIELDS = ("model", "data", "eval_data", "out", "reward", "grader_url", *LIMIT_FIELDS)


@dataclass(frozen=True)
class JobDirectories:
    """Creates job directories from requests and uploads. `data_dir` holds the uploaded files that `store` lists."""

    settings: Settings
    data_dir: Path
    store: JobStore

    def fill(self, directory: Path, body: FinetuneBody, source: WeightSource, rows: Path | None) -> TrainConfig:
        """Creates `directory` with a job's data and returns the job's configuration.

        `rows` is a folder with the rows of a long request, which a parser process wrote to files. Raises Fault for data
        or hyper-parameters that are refused.
        """
        directory.mkdir(mode=0o700)
        row_files = {} if rows is None else {path.stem: path for path in rows.iterdir()}
        data = self._add_rows(directory / "data", body.data, body.file_id, row_files.get("data"))
        validation = self._add_rows(
            directory / "validation", body.validation_data, body.validation_file_id, row_files.get("validation_data")
        )
        return self._create_config(directory, body, source, data, validation)

    def _add_rows(self, stem: Path, rows: Rows | None, file_id: str | None, row_file: Path | None) -> list[Path]:
        """Adds an uploaded file, the file `row_file` or `rows` to the job's directory as `stem` with a suffix.

        Returns the path of the new file in a list, which is empty if the request has no rows of this kind.
        """
        if file_id is not None:
            source = file_path(self.data_dir, self.store.file(file_id).id)
            path = stem.with_name(stem.name + "".join(source.suffixes))
            _link(source, path)
            return [path]
        if rows is None:
            return []
        path = stem.with_suffix(".jsonl")
        if row_file is not None:
            row_file.rename(path)
            return [path]
        limits = self.settings.limits
        try:
            write_rows(path, rows, limits.rows, limits.row_bytes)
        except RequestError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error), param=stem.name) from None
        return [path]

    def _create_config(
        self,
        directory: Path,
        body: FinetuneBody,
        source: WeightSource,
        data: Sequence[Path],
        validation: Sequence[Path],
    ) -> TrainConfig:
        """Returns the job's configuration. Raises Fault if the trainer would refuse it."""
        check_grader(body.grader_url, self.settings.grader_urls)
        limits = self.settings.limits
        try:
            model = read_config(source.directory)
            seq_len = body.seq_len or min(DEFAULT_SEQ_LEN, model.max_position_embeddings)
            check_length(seq_len, model)
            config = TrainConfig.from_dict(
                body.hyper_parameters()
                | {"model": str(source.directory.resolve()), "out": str(directory / "out"), "seq_len": seq_len}
                | {"data": [str(p) for p in data], "eval_data": [str(p) for p in validation]}
                | {"max_rows": limits.rows, "max_row_bytes": limits.row_bytes}
                | {"max_data_bytes": limits.upload_bytes, "max_data_memory": limits.validation_memory}
                | {"device": self.settings.training_device, "report_to": list(self.settings.report_to)}
            )
            check_optimizer_package(config)
        except Fp8ServeError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error)) from None
        try:
            if config.lora_targets:
                select_linears(adaptable_linear_names(model), config.lora_targets)
        except ModelError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error), param="lora_targets") from None
        return config


def write_config(directory: Path, config: TrainConfig) -> None:
    """Writes `job.json` and flushes the job's directory to the disk."""
    (directory / "job.json").write_text(config.to_json(), encoding="utf-8")
    for path in (directory / "job.json", directory, directory.parent):
        fsync(path)


def public_config(config: TrainConfig) -> dict[str, Any]:
    """Returns the configuration as clients see it: without paths on the server's disk, and without addresses, which may
    contain a password."""
    public = {k: v for k, v in json.loads(config.to_json()).items() if k not in PRIVATE_FIELDS}
    return public | {"learning_rate": public.pop("lr")}


def request_hash(body: Body, rows: Path | None = None) -> str:
    """Returns a hash of a request and of its rows in a folder, to compare requests with the same idempotency key."""
    digest = hashlib.sha256(body.model_dump_json().encode())
    for path in sorted(rows.iterdir()) if rows is not None else ():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _link(source: Path, path: Path) -> None:
    """Links the upload into the job's directory, so that the job keeps its data if the upload is deleted."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
        fsync(path)


def file_path(data_dir: Path, file_id: str) -> Path:
    """Returns the path of an uploaded file whose id is in the database. Raises Fault 404 if the file is missing."""
    for path in (data_dir / "files").glob(f"{file_id}.*"):
        return path
    raise Fault(Code.FILE_NOT_FOUND, "The file with that id is missing on the server's disk.", param="file_id")


DEFAULT_PORTS = {"http": 80, "https": 443}


def check_grader(url: str | None, allowed: Iterable[str]) -> None:
    """Raises Fault unless `url` is below an allowed address. The message does not reveal the allowed addresses."""
    if url is None:
        return
    if (address := http_address(url)) is None:
        message = f"grader_url must be an address such as http://localhost:9000/grade, not {shown(url)}."
        raise Fault(Code.INVALID_PARAMETER, message, param="grader_url")
    if not any(_is_below(address, root) for root in map(http_address, allowed) if root is not None):
        raise Fault(
            Code.INVALID_PARAMETER,
            "This server does not send completions to that address.",
            param="grader_url",
            hint="Its operator allows addresses of graders with --grader-url.",
        )


def _is_below(url: SplitResult, root: SplitResult) -> bool:
    is_same = _origin(url) == _origin(root)
    prefix = f"{root.path.rstrip('/')}/"
    return is_same and "@" not in url.netloc and _is_plain(url.path) and f"{url.path}/".startswith(prefix)


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port or DEFAULT_PORTS.get(url.scheme)


def _is_plain(path: str) -> bool:
    """Whether a server resolves the path as it is written: it contains no `..`, however encoded."""
    return "%" not in path and "\\" not in path and not {".", ".."} & set(path.split("/"))
