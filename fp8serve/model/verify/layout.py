"""Tensors that are missing, left over, present twice, not where the index places them, or not as quantization_config
states."""

import math
from collections.abc import Iterator

import torch

from fp8serve.errors import Fp8ServeError
from fp8serve.model.formats.interop import BLOCKED_INPUT, KV, Scheme
from fp8serve.model.formats.scales import FILE_NAME, problems, read_scales
from fp8serve.model.formats.targets import CLASS, matches
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.shards import INDEX, SINGLE
from fp8serve.model.verify.subject import AGAIN, FP8, Finding, Subject, error, is_embedding, warning

TOLERANCE = 0.01  # between a scale and its copy in scales.safetensors: another project may have rounded it to BF16
_EMBEDDINGS = "embed_tokens.weight"
BLOCK = 128  # rows and columns of a weight that share a scale
_CONFIG = "quantization_config"
_WRITE = "correct quantization_config, or write the model again"


def index_and_files(subject: Subject) -> Iterator[Finding]:
    """The index and the files that it names hold the same tensors."""
    for name, file in (subject.weight_map or {}).items():
        folder = subject.path
        if file != (folder / file).name:
            yield error("index", INDEX, f"names the file {file!r}, which is not a plain name", AGAIN)
        elif not present(folder / file):
            yield error("index", name, f"should lie in {file}, which is missing", AGAIN)
        elif name not in subject.entries and not _is_unreadable(subject, file):
            yield error("index", name, f"is not in {file}, where {INDEX} places it", AGAIN)
        elif name in subject.entries and subject.entries[name].file.name != file:
            yield error("index", name, f"lies in {subject.entries[name].file.name}, not in {file}", AGAIN)


def unlisted_tensors(subject: Subject) -> Iterator[Finding]:
    if subject.weight_map is not None:
        for key in subject.entries.keys() - subject.weight_map.keys():
            yield error("index", key, f"is not listed in {INDEX}, so that readers leave it out", AGAIN)


def two_layouts(subject: Subject) -> Iterator[Finding]:
    """One file and an index of others: which of them is the model?"""
    named = subject.weight_map and SINGLE in subject.weight_map.values()
    if subject.weight_map is not None and (subject.path / SINGLE).is_file() and not named:
        yield error("index", SINGLE, f"lies beside an {INDEX} that does not name it", "keep one of the two")


def total_size(subject: Subject) -> Iterator[Finding]:
    """The index states how many bytes the tensors have."""
    if subject.weight_map is None:
        return
    metadata = read_json(subject.path / INDEX).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(math.prod(e.shape) * e.dtype.itemsize for e in subject.entries.values())
    if isinstance(stated, int) and stated != size:
        yield warning("index", INDEX, f"states {stated} bytes of tensors; there are {size}", AGAIN)


def unknown_scales(subject: Subject) -> Iterator[Finding]:
    for key in subject.unknown:
        what = "is named like a scale, and no reader knows what it scales"
        yield error("unknown", key, what, "rename it as docs/formats.md says, or take it out")


def repeated_scales(subject: Subject) -> Iterator[Finding]:
    for keys in subject.scales.values():
        if len(keys) > 1:
            yield error("duplicate", keys[1], f"means the same scale as {keys[0]}", "keep one of the two")


def missing_weight_scales(subject: Subject) -> Iterator[Finding]:
    for owner, key in subject.weights.items():
        if subject.scale_of(owner, "weight") is None:
            yield error("missing", key, "is FP8 and has no scale", f"add {owner}.weight_scale, or {AGAIN}")
    for key, entry in subject.entries.items():
        if key.endswith(".weight_packed") and entry.dtype is torch.uint8 and key not in subject.mx:
            yield error("missing", key, "is packed and has no scales of 32 numbers each", AGAIN)


def unscaled_vectors(subject: Subject) -> Iterator[Finding]:
    """Norms and biases in FP8, for which no format has a scale."""
    scales = {key for keys in subject.scales.values() for key in keys}
    for key, entry in subject.entries.items():
        if entry.dtype in FP8 and len(entry.shape) < 2 and key not in scales and key.endswith((".weight", ".bias")):
            yield error("missing", key, "is FP8, and no format has a scale for it", "store it in BF16 or FP32")


def orphaned_scales(subject: Subject) -> Iterator[Finding]:
    """Scales of a weight that is missing, or is not FP8."""
    quantized = subject.weights.keys() | {key.rpartition(".")[0] for key in subject.mx}
    for owner, key in subject.of_role("weight", "input"):
        if owner not in quantized:
            known = f"{owner}.weight" in subject.entries
            what = f"scales {owner}.weight, which is {'not FP8' if known else 'not there'}"
            yield error("orphan", key, what, "take it out, or write the weight again")


def lone_cache_scales(subject: Subject) -> Iterator[Finding]:
    """Keys without values, some layers without any, or scales of a layer that is not there."""
    owners = {owner: {p.role for p in subject.scales if p.owner == owner} for owner, _ in subject.of_role(*KV)}
    for owner, roles in owners.items():
        if "kv" in roles and len(roles) > 1:
            yield error(
                "duplicate", owner, "has a kv_scale beside a k_scale or v_scale", "keep one for each of k and v"
            )
        elif not {"k", "v"} <= roles and "kv" not in roles:
            yield error("missing", owner, "has a KV-cache scale for only one of k and v", "calibrate the cache again")
    attention = {key.removesuffix(".o_proj.weight") for key in subject.entries if key.endswith("attn.o_proj.weight")}
    for owner, key in subject.of_role(*KV):
        if attention and owner not in attention:
            yield error("orphan", key, "is the KV-cache scale of a layer that is not there", "take it out")
    for owner in sorted(attention - owners.keys() if owners else ()):
        yield error(
            "missing", owner, "has no KV-cache scale, though other layers have one", "calibrate the cache again"
        )


def tied_weights(subject: Subject) -> Iterator[Finding]:
    """config.json says whether the output layer is the embedding."""
    config = subject.config or {}
    tied = config.get("tie_word_embeddings")
    heads = [key for key in subject.entries if key.endswith("lm_head.weight")]
    embeddings = [key for key in subject.entries if key.endswith(_EMBEDDINGS)]
    if tied is True and heads and embeddings and not subject.shards.same(heads[0], embeddings[0]):
        what = f"differs from {embeddings[0]}, to which config.json ties it"
        yield error("tied", heads[0], what, "set tie_word_embeddings to false, or take the tensor out")
    elif tied is False and embeddings and not heads and not _is_unreadable(subject):
        what = "is not there, and config.json does not tie it to the embedding"
        yield error("tied", "lm_head.weight", what, "set tie_word_embeddings to true, or add the tensor")


def side_car(subject: Subject) -> Iterator[Finding]:
    """`scales.safetensors` has scales that can be served, the same as those beside the weights."""
    file = subject.path / FILE_NAME
    if not file.is_file():
        return
    try:
        state = read_scales(file)
    except Fp8ServeError as damage:
        yield error("unreadable", FILE_NAME, f"cannot be read ({str(damage).removesuffix('.')})", AGAIN)
        return
    for tensor, problem in problems(state):
        yield error("stale", f"{FILE_NAME}: {tensor}", problem, "calibrate the model again")
    for tensor, entry in state.tensors.items():
        owner, _, role = tensor.rpartition(".")
        key = subject.scale_of(owner, role) if role in ("input", "weight", "k", "v") else None  # type: ignore[arg-type]
        value = None if key is None else subject.value(key)
        if value is not None and value.numel() == 1 and not abs(float(entry.scale) * float(value) - 1) <= TOLERANCE:
            what = f"is not the scale that {FILE_NAME} has for it, {1 / float(entry.scale):.4g}"
            yield error("stale", str(key), what, "write the directory again")


def _is_unreadable(subject: Subject, file: str | None = None) -> bool:
    """Whether this file, or any, could not be read, so that its tensors are not reported as missing as well."""
    return any(t.check == "unreadable" and file in (None, t.tensor) for t in subject.trouble)


def fp8_without_config(subject: Subject) -> Iterator[Finding]:
    is_configured = subject.quantization is not None or any(t.check == "config" for t in subject.trouble)
    if subject.config is not None and subject.weights and not is_configured:
        key = next(iter(subject.weights.values()))
        what = "is FP8, but config.json has no quantization_config"
        yield error("config", key, what, "add the quantization_config of the tool that wrote the model")


def config_without_fp8(subject: Subject) -> Iterator[Finding]:
    quantization = subject.quantization
    has_experts_in_blocks = any(key.endswith("_blocks") for key in subject.entries)  # of gpt-oss
    has_fp8 = subject.weights or subject.mx or has_experts_in_blocks
    if quantization is not None and quantization.groups and not has_fp8:
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


def _scheme(subject: Subject, owner: str) -> Scheme | None:
    """The configuration of the layer; None: there is none, which other checks report."""
    return None if subject.quantization is None else subject.quantization.find_scheme(owner)
