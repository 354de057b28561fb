"""A job's directory, in the layout that the training process expects.

JOB_DIR/data.jsonl | data.csv | ...   the rows (a hard link where they were uploaded), validation.* likewise
JOB_DIR/job.json                TrainConfig
JOB_DIR/out/                    checkpoints and the result
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

from fp8serve.errors import Fp8ServeError, RequestError, shown
from fp8serve.model.config.decoder import read_config
from fp8serve.model.storage.files import fsync
from fp8serve.options import http_address
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.parsing.sizes import write_rows
from fp8serve.server.schemas.bodies import Body
from fp8serve.server.schemas.finetune_bodies import FinetuneBody, Rows
from fp8serve.server.serving.served import Source
from fp8serve.server.settings import ServerLimits, Settings
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import check_length
from fp8serve.train.reporting import check_states

SEQ_LEN = TrainConfig.seq_len
LIMITS = ("max_rows", "max_row_bytes", "max_data_bytes", "max_data_memory")
PRIVATE = ("model", "data", "eval_data", "out", "reward", "grader_url", *LIMITS)


@dataclass(frozen=True)
class JobDirectories:
    """Fills directories of jobs from requests and uploads. `data_dir` holds the uploads that `store` names."""

    settings: Settings
    data_dir: Path
    store: JobStore

    def fill(self, directory: Path, body: FinetuneBody, source: Source, rows: Path | None) -> TrainConfig:
        """Makes `directory` with a job's data; returns what the job is to do. Fault for data or numbers that are
        refused.

        `rows` is the folder where the rows of a long request lie.
        """
        directory.mkdir(mode=0o700)
        spooled = {} if rows is None else {path.stem: path for path in rows.iterdir()}
        data = self._place(directory / "data", body.data, body.file_id, spooled.get("data"))
        held_out = self._place(
            directory / "validation", body.validation_data, body.validation_file_id, spooled.get("validation_data")
        )
        return self._config(directory, body, source, data, held_out)

    def _place(self, stem: Path, rows: Rows | None, file_id: str | None, spooled: Path | None) -> list[Path]:
        """Puts the rows, the file they were `spooled` to, or an uploaded file into the job's directory; the paths.
        Empty if none of them is given.
        """
        if file_id is not None:
            source = file_path(self.data_dir, self.store.file(file_id).id)
            path = stem.with_name(stem.name + "".join(source.suffixes))
            _link(source, path)
            return [path]
        if rows is None:
            return []
        path = stem.with_suffix(".jsonl")
        if spooled is not None:
            spooled.rename(path)
            return [path]
        limits = self.settings.limits
        try:
            write_rows(path, rows, limits.rows, limits.row_bytes)
        except RequestError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error), param=stem.name) from None
        return [path]

    def _config(
        self, directory: Path, body: FinetuneBody, source: Source, data: Sequence[Path], held_out: Sequence[Path]
    ) -> TrainConfig:
        """Fault when the trainer would refuse the numbers."""
        check_grader(body.grader_url, self.settings.grader_urls)
        try:
            model = read_config(source.directory)
            seq_len = body.seq_len or min(SEQ_LEN, model.max_position_embeddings)
            check_length(seq_len, model)
            config = TrainConfig.from_dict(
                body.hyper_parameters()
                | {"model": str(source.directory.resolve()), "out": str(directory / "out"), "seq_len": seq_len}
                | {"data": [str(p) for p in data], "eval_data": [str(p) for p in held_out]}
                | dict(zip(LIMITS, _data_limits(self.settings.limits), strict=True))
                | {"device": self.settings.training_device, "report_to": list(self.settings.report_to)}
            )
            check_states(config)
            return config
        except Fp8ServeError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error)) from None


def _data_limits(limits: ServerLimits) -> tuple[int, int, int, int]:
    return limits.rows, limits.row_bytes, limits.upload_bytes, limits.validation_memory


def write_config(directory: Path, config: TrainConfig) -> None:
    """`job.json`; the whole directory is on the disk when this returns."""
    (directory / "job.json").write_text(config.to_json(), encoding="utf-8")
    for path in (directory / "job.json", directory, directory.parent):
        fsync(path)


def public_config(config: TrainConfig) -> dict[str, Any]:
    """The configuration as clients see it: without paths on the server's disk, and without addresses, which may hold a
    password."""
    public = {k: v for k, v in json.loads(config.to_json()).items() if k not in PRIVATE}
    return public | {"learning_rate": public.pop("lr")}


def request_hash(body: Body, rows: Path | None = None) -> str:
    """A hash of a request, with the rows that lie in a folder, to compare requests of one idempotency key."""
    digest = hashlib.sha256(body.model_dump_json().encode())
    for path in sorted(rows.iterdir()) if rows is not None else ():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _link(source: Path, path: Path) -> None:
    """Deleting the upload later must not pull the data from under a job."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
        fsync(path)


def file_path(data_dir: Path, file_id: str) -> Path:
    """Where an upload lies. `file_id` is one that the file table holds. Fault 404 when its bytes are gone."""
    for path in (data_dir / "files").glob(f"{file_id}.*"):
        return path
    raise Fault(Code.FILE_NOT_FOUND, "The file of that id is no longer there.", param="file_id")


PORTS = {"http": 80, "https": 443}


def check_grader(url: str | None, allowed: Iterable[str]) -> None:
    """Fault for an address that is not allowed. The message does not say which ones are."""
    if url is None:
        return
    if (address := http_address(url)) is None:
        message = f"grader_url must be an address such as http://localhost:9000/grade, not {shown(url)}."
        raise Fault(Code.INVALID_PARAMETER, message, param="grader_url")
    if not any(_is_below(address, known) for known in map(http_address, allowed) if known is not None):
        raise Fault(
            Code.INVALID_PARAMETER,
            "This server does not send answers to that address.",
            param="grader_url",
            hint="Its operator names those that it may ask with --grader-url.",
        )


def _is_below(url: SplitResult, known: SplitResult) -> bool:
    same = _place(url) == _place(known)
    root = known.path.rstrip("/")
    return same and "@" not in url.netloc and _is_plain(url.path) and f"{url.path}/".startswith(f"{root}/")


def _place(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port or PORTS.get(url.scheme)


def _is_plain(path: str) -> bool:
    """Whether the path means what it looks like: it holds no `..`, however that is encoded."""
    return "%" not in path and "\\" not in path and not {".", ".."} & set(path.split("/"))
