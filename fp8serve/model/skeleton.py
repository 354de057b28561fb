"""The module of a configuration without its weights, a decoder or an encoder, and its linears."""

from fp8serve.model.any_config import AnyConfig
from fp8serve.model.decoder import Decoder, linear_names
from fp8serve.model.encoder import Encoder, encoder_linears
from fp8serve.model.encoder_config import EncoderConfig


def skeleton(config: AnyConfig) -> Decoder | Encoder:
    """The module on "meta"."""
    if isinstance(config, EncoderConfig):
        return Encoder(config, device="meta")
    return Decoder(config, device="meta")


def linears_of(model: Decoder | Encoder) -> list[str]:
    """Names of the linears that FP8 may run, in the model's order."""
    return encoder_linears(model.config) if isinstance(model, Encoder) else linear_names(model)
