"""Compares the tensors with the statements of quantization_config."""

from collections.abc import Iterator

from fp8serve.model.formats.interop import BLOCKED_INPUT, KV, Scheme
from fp8serve.model.formats.targets import CLASS, matches
from fp8serve.model.verify.finding import Finding, error, warning
from fp8serve.model.verify.subject import Subject, is_embedding

BLOCK = 128  # rows and columns of a weight that share a scale
_CONFIG = "quantization_config"
_WRITE = "correct quantization_config, or write the model again"


def fp8_without_config(subject: Subject) -> Iterator[Finding]:
    told = subject.quantization is not None or any(t.check == "config" for t in subject.trouble)
    if subject.config is not None and subject.weights and not told:
        key = next(iter(subject.weights.values()))
        what = "is FP8, but config.json has no quantization_config"
        yield error("config", key, what, "add the quantization_config of the tool that wrote the model")


def config_without_fp8(subject: Subject) -> Iterator[Finding]:
    quantization = subject.quantization
    if quantization is not None and quantization.groups and not (subject.weights or subject.mx or _has_blocks(subject)):
        what = f"says that weights are quantized by {quantization.producer}, and none is"
        yield error("config", _CONFIG, what, "take it out, or write the model again")


def ignored_layers(subject: Subject) -> Iterator[Finding]:
    """Layers that should not be FP8 but are, and the reverse."""
    quantization = subject.quantization
    if quantization is None:
        return
    for owner, key in subject.weights.items():
        if _is_left_out(owner, quantization.ignore):
            yield error("config", key, f"is FP8, but {_CONFIG} leaves {owner} out", _WRITE)
        elif _scheme(subject, owner) is None:
            yield error("config", key, f"is FP8, but no group of {_CONFIG} has {owner}", _WRITE)
    leaves = {owner.rpartition(".")[2] for owner in subject.weights}
    for key, entry in subject.entries.items():
        owner = key.removesuffix(".weight")
        plain = key.endswith(".weight") and len(entry.shape) == 2 and key not in subject.mx
        if not plain or owner in subject.weights or owner.rpartition(".")[2] not in leaves:
            continue
        if not _is_left_out(owner, quantization.ignore) and _scheme(subject, owner) is not None:
            yield error("config", key, f"is not FP8, but {_CONFIG} does not leave {owner} out", _WRITE)


def input_scales(subject: Subject) -> Iterator[Finding]:
    """Static inputs have a scale in every layer, dynamic ones in none."""
    for owner in subject.weights:
        scheme, key = _scheme(subject, owner), subject.scale_of(owner, "input")
        if scheme is None:
            continue
        is_static = scheme.input_spec.source == "stored" and not is_embedding(owner)
        if is_static and key is None:
            what = f"has no input_scale, though {_CONFIG} says that inputs are static"
            yield error("missing", owner, what, "calibrate the model, or choose dynamic inputs")
        elif key is not None and not is_static:
            yield warning("config", key, f"is not used: {_CONFIG} says that inputs are dynamic", "take it out")


def weight_blocks(subject: Subject) -> Iterator[Finding]:
    """If inputs are quantized in blocks, weights must be, too."""
    for owner in subject.weights:
        scheme, kind = _scheme(subject, owner), subject.granularity(owner)
        blocks = scheme is not None and scheme.input_spec.granularity == BLOCKED_INPUT.granularity
        single = kind == "tensor" and max(subject.entries[subject.weights[owner]].shape[-2:]) <= BLOCK
        if kind is not None and blocks and not (kind == "block128x128" or single):
            what = f"is one for each {kind}, but {_CONFIG} says blocks of 128 x 128"
            yield error("config", str(subject.scale_of(owner, "weight")), what, _WRITE)


def cache_scheme(subject: Subject) -> Iterator[Finding]:
    """A cache that is declared FP8 must have scales; readers use 1 where there are none."""
    config = (subject.config or {}).get(_CONFIG)
    says = isinstance(config, dict) and bool(config.get("kv_cache_scheme"))
    if says and not any(True for _ in subject.of_role(*KV)):
        what = "has a kv_cache_scheme, but no k_scale or v_scale is there"
        yield error("missing", _CONFIG, what, "calibrate the cache, or take the scheme out")


def _is_left_out(owner: str, targets: tuple[str, ...]) -> bool:
    """By its own name, or by that of a module around it: "model.vision_tower" is all of it, however it is wrapped."""
    parts = f".{owner}."
    around = (f".{target.removeprefix('model.')}." in parts for target in targets)
    return any(around) or any(matches(target, owner) for target in targets if target != CLASS)


def _has_blocks(subject: Subject) -> bool:
    """Experts of gpt-oss, which are read by other names."""
    return any(key.endswith("_blocks") for key in subject.entries)


def _scheme(subject: Subject, owner: str) -> Scheme | None:
    """The configuration of the layer; None: there is none, which other checks report."""
    return None if subject.quantization is None else subject.quantization.find_scheme(owner)
