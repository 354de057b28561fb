"""The module of a configuration: our decoder where the architecture has a family, else transformers' own class."""

import torch

from fp8serve.model.config import ModelConfig
from fp8serve.model.decoder import Decoder
from fp8serve.model.transformers_backend.network import TransformersModel

Model = Decoder | TransformersModel


def build_on_meta(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Without weights: every parameter is on "meta"."""
    return (
        Decoder(config, device="meta", dtype=dtype) if config.computed_by is None else TransformersModel(config, dtype)
    )
