"""The module of a configuration: our decoder, transformers' own class where there is no family, or our encoder."""

import torch

from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.config.either import AnyConfig
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.modern_encoder import encoder_class
from fp8serve.model.transformers_backend.network import TransformersModel

Model = Decoder | TransformersModel  # a language model
AnyModel = Model | Encoder


def build_on_meta(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Without weights: every parameter is on "meta"."""
    if config.computed_by is not None:
        return TransformersModel(config, dtype)
    return Decoder(config, device="meta", dtype=dtype)


def skeleton(config: AnyConfig) -> AnyModel:
    """As `build_on_meta`, for encoders, too."""
    return encoder_class(config)(config, device="meta") if isinstance(config, EncoderConfig) else build_on_meta(config)


def transposed_linears(model: Model | Encoder) -> frozenset[str]:
    """The linears whose weights are transposed in files."""
    return model.transposed if isinstance(model, TransformersModel) else frozenset()
