"""What identifies a job: its numbers, its data and the model it starts from; a resumed run must have the same ones.

A resumed run no longer needs the base model, so its directory may be gone. But a directory that holds another model now
is an error, because the run would silently ignore that model. The length of a run (`epochs`, `max_steps`) may change.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from fp8serve.errors import JobError
from fp8serve.model.export import CARRIED
from fp8serve.model.formats.scales import FILE_NAME, fingerprint
from fp8serve.model.storage.files import MAX_CARRIED_BYTES, read_json
from fp8serve.model.storage.opening import open_member, regular_file
from fp8serve.train.config import LENGTH, TrainConfig


def dated(config: TrainConfig, latest: Path | None) -> TrainConfig:
    """The configuration with the date for templates: its own, else the checkpoint's, else today's."""
    if config.template_date is not None:
        return config
    saved = read_json(latest / "trainer.json", JobError)["config"].get("template_date") if latest else None
    return dataclasses.replace(config, template_date=saved or date.today().isoformat())


def identity_of(config: TrainConfig, data: str, latest: Path | None) -> dict[str, Any]:
    """{"config", "data", "model"} of a run; "model" comes from the checkpoint if the base model is gone."""
    model = model_digest(Path(config.model))
    if model is None and latest is not None:
        model = read_json(latest / "trainer.json", JobError)["identity"].get("model")
    return {"config": config.defines(), "data": data, "model": model}


def model_digest(directory: Path) -> str | None:
    """32 hex digits of everything that a run reads from a base model: weights, scales, tokenizer; None if it is
    gone."""
    if not (directory / "config.json").exists():
        return None
    digest = hashlib.sha256(fingerprint(directory).encode())
    for name in sorted({*CARRIED, FILE_NAME}):
        if regular_file(directory / name):
            limit = None if name == FILE_NAME else MAX_CARRIED_BYTES
            with open_member(directory / name, limit) as file:
                digest.update(f"{name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def check_same_job(now: Mapping[str, Any], then: Mapping[str, Any], path: Path) -> None:
    """Raises JobError, naming the first difference, when the checkpoint `path` is of another job.

    Values that an older version did not record are not compared.
    """
    for key, value in now["config"].items():
        if key not in LENGTH and key in then["config"] and then["config"][key] != value:
            raise JobError(
                f"{path} was written with {key}={then['config'][key]!r}, this job says {value!r}; "
                "use the same value or another output directory."
            )
    if now["model"] != then.get("model", now["model"]):
        raise JobError(f"{path} was trained from another model than this job names; use another output directory.")
    if now["data"] != then["data"]:
        raise JobError(f"The training data differ from those {path} was trained on; use another output directory.")
