"""Whatever a directory holds, a decoder or an encoder: its configuration, its module without weights, its linears."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8serve.model.config import ModelConfig, parse_config, read_config
from fp8serve.model.decoder import Decoder, linear_names
from fp8serve.model.encoder import Encoder, encoder_linears
from fp8serve.model.encoder_config import EncoderConfig, is_encoder, parse_encoder_config
from fp8serve.model.files import read_optional_json

AnyConfig = ModelConfig | EncoderConfig


def holds_encoder(model_dir: Path | str) -> bool:
    """Whether the directory is that of an encoder. ModelError: a damaged config.json."""
    return is_encoder(read_optional_json(Path(model_dir) / "config.json"))


def read_any_config(model_dir: Path | str) -> AnyConfig:
    """See `read_config`."""
    path = Path(model_dir) / "config.json"
    raw = read_optional_json(path)
    return parse_encoder_config(raw, str(path)) if is_encoder(raw) else read_config(model_dir)


def parse_any_config(raw: Mapping[str, Any]) -> AnyConfig:
    """See `parse_config`."""
    return parse_encoder_config(raw) if is_encoder(raw) else parse_config(raw)


def skeleton(config: AnyConfig) -> Decoder | Encoder:
    """The module on "meta"."""
    if isinstance(config, EncoderConfig):
        return Encoder(config, device="meta")
    return Decoder(config, device="meta")


def linears_of(model: Decoder | Encoder) -> list[str]:
    """Names of the linears that FP8 may run, in the model's order."""
    return encoder_linears(model.config) if isinstance(model, Encoder) else linear_names(model)
