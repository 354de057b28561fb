"""The configuration in a directory, of a decoder or of an encoder. No torch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fp8serve.model.config.decoder import check_config, parse_config, read_config
from fp8serve.model.config.encoder import EncoderConfig, is_encoder, parse_encoder_config
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.storage.files import read_optional_json

AnyConfig = ModelConfig | EncoderConfig
ComputedBy = Literal["fp8serve", "transformers"]
COMPUTED_BY: dict[ComputedBy, str] = {
    "fp8serve": "computed by fp8serve's own layers",
    "transformers": "computed by transformers' own class, because it has no family here: the same numerics, and slower",
}


def computed_by(config: AnyConfig) -> ComputedBy:
    """Who computes the model; `COMPUTED_BY` has the words for it."""
    return "transformers" if isinstance(config, ModelConfig) and config.computed_by is not None else "fp8serve"


def holds_encoder(model_dir: Path | str) -> bool:
    """Whether the directory is that of an encoder. ModelError: a damaged config.json."""
    return is_encoder(read_optional_json(Path(model_dir) / "config.json"))


def read_any_config(model_dir: Path | str) -> AnyConfig:
    """See `read_config`."""
    path = Path(model_dir) / "config.json"
    raw = read_optional_json(path)
    return parse_encoder_config(raw, str(path)) if is_encoder(raw) else read_config(model_dir)


def check_any_config(model_dir: Path | str) -> None:
    """See `check_config`."""
    path = Path(model_dir) / "config.json"
    raw = read_optional_json(path)
    if is_encoder(raw):
        parse_encoder_config(raw, str(path))
    else:
        check_config(model_dir)


def parse_any_config(raw: Mapping[str, Any]) -> AnyConfig:
    """See `parse_config`."""
    return parse_encoder_config(raw) if is_encoder(raw) else parse_config(raw)
