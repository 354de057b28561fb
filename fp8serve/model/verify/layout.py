"""Checks for tensors that are missing, unused or duplicate, or that contradict the index or quantization_config."""

import math
from collections.abc import Iterator

from fp8serve.errors import Fp8ServeError
from fp8serve.model.formats.interop import BLOCKED_INPUT, KV, Scheme
from fp8serve.model.formats.scales import COPY_TOLERANCE, FILE_NAME, find_problems, read_scales
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.shards import SAFE_WEIGHTS, SAFE_WEIGHTS_INDEX
from fp8serve.model.verify.raw_checkpoint import (
    FP8,
    WRITE_AGAIN,
    Finding,
    RawCheckpoint,
    error,
    is_embedding,
    owner_of_codes,
    warning,
)

_EMBEDDINGS = "embed_tokens.weight"
BLOCK = 128  # rows and columns of a weight that share a scale
_CONFIG = "quantization_config"
_CORRECT_CONFIG = "correct quantization_config, or write the model again"


def check_index_and_files(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Compares the index with the files and tensors that it names."""
    for name, file in (checkpoint.weight_map or {}).items():
        folder = checkpoint.path
        if file != (folder / file).name:
            yield error("index", SAFE_WEIGHTS_INDEX, f"names the file {file!r}, which is not a plain name", WRITE_AGAIN)
        elif not present(folder / file):
            yield error("index", name, f"should lie in {file}, which is missing", WRITE_AGAIN)
        elif name not in checkpoint.entries and not _is_unreadable(checkpoint, file):
            yield error("index", name, f"is not in {file}, where {SAFE_WEIGHTS_INDEX} places it", WRITE_AGAIN)
        elif name in checkpoint.entries and checkpoint.entries[name].file.name != file:
            yield error("index", name, f"lies in {checkpoint.entries[name].file.name}, not in {file}", WRITE_AGAIN)


def check_unlisted_tensors(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    if checkpoint.weight_map is not None:
        for key in checkpoint.entries.keys() - checkpoint.weight_map.keys():
            what = f"is not listed in {SAFE_WEIGHTS_INDEX}, so that readers leave it out"
            yield error("index", key, what, WRITE_AGAIN)


def check_two_layouts(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds a directory with an index and another file that may also be the model."""
    is_listed = checkpoint.weight_map and SAFE_WEIGHTS in checkpoint.weight_map.values()
    if checkpoint.weight_map is not None and (checkpoint.path / SAFE_WEIGHTS).is_file() and not is_listed:
        yield error(
            "index", SAFE_WEIGHTS, f"lies beside an {SAFE_WEIGHTS_INDEX} that does not name it", "keep one of the two"
        )


def check_total_size(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Compares the index's number of bytes with the tensors."""
    if checkpoint.weight_map is None:
        return
    metadata = read_json(checkpoint.path / SAFE_WEIGHTS_INDEX).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(math.prod(e.shape) * e.dtype.itemsize for e in checkpoint.entries.values())
    if isinstance(stated, int) and stated != size:
        yield warning("index", SAFE_WEIGHTS_INDEX, f"states {stated} bytes of tensors; there are {size}", WRITE_AGAIN)


def check_unknown_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    for key in checkpoint.unknown:
        what = "is named like a scale, and no reader knows what it scales"
        yield error("unknown", key, what, "rename it as docs/formats.md says, or remove it")


def check_repeated_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    for keys in checkpoint.scales.values():
        if len(keys) > 1:
            yield error("duplicate", keys[1], f"means the same scale as {keys[0]}", "keep one of the two")


def check_missing_weight_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    for owner, key in checkpoint.weights.items():
        if checkpoint.scale_of(owner, "weight") is None:
            yield error("missing", key, "is FP8 and has no scale", f"add {owner}.weight_scale, or {WRITE_AGAIN}")
    for key in checkpoint.entries:
        if checkpoint.is_4bit_name(key) and owner_of_codes(key) not in checkpoint.packed:
            yield error("missing", key, "is packed and has no scales of 32 or 16 numbers each", WRITE_AGAIN)


def check_unscaled_vectors(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds norms and biases in FP8, for which no format has a scale."""
    scales = set(checkpoint.scale_keys)
    for key, entry in checkpoint.entries.items():
        if entry.dtype in FP8 and len(entry.shape) < 2 and key not in scales and key.endswith((".weight", ".bias")):
            yield error("missing", key, "is FP8, and no format has a scale for it", "store it in BF16 or FP32")


def check_orphaned_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds scales of a weight that is missing or not FP8."""
    quantized = checkpoint.weights.keys() | {key.rpartition(".")[0] for key in checkpoint.mx_scales}
    quantized |= {owner_of_codes(key) for key in checkpoint.entries if checkpoint.is_4bit_name(key)}
    quantized |= checkpoint.int4_owners
    for owner, key in checkpoint.with_role("weight", "input"):
        if owner not in quantized:
            exists = f"{owner}.weight" in checkpoint.entries
            what = f"scales {owner}.weight, which is {'not FP8' if exists else 'missing'}"
            yield error("orphan", key, what, "remove it, or write the weight again")


def check_lone_cache_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds layers with a KV-cache scale for only one of k and v, without any, or that do not exist."""
    scales = checkpoint.scales
    owners = {owner: {s.role for s in scales if s.owner == owner} for owner, _ in checkpoint.with_role(*KV)}
    for owner, roles in owners.items():
        if "kv" in roles and len(roles) > 1:
            what = "has a kv_scale beside a k_scale or v_scale"
            yield error("duplicate", owner, what, "keep one scale for each of k and v")
        elif not {"k", "v"} <= roles and "kv" not in roles:
            yield error("missing", owner, "has a KV-cache scale for only one of k and v", "calibrate the cache again")
    attention = {key.removesuffix(".o_proj.weight") for key in checkpoint.entries if key.endswith("attn.o_proj.weight")}
    for owner, key in checkpoint.with_role(*KV):
        if attention and owner not in attention:
            yield error("orphan", key, "is the KV-cache scale of a layer that does not exist", "remove it")
    for owner in sorted(attention - owners.keys() if owners else ()):
        yield error("missing", owner, "has no KV-cache scale, unlike other layers", "calibrate the cache again")


def check_tied_weights(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Compares `tie_word_embeddings` in config.json with the tensors."""
    config = checkpoint.config or {}
    is_tied = config.get("tie_word_embeddings")
    heads = [key for key in checkpoint.entries if key.endswith("lm_head.weight")]
    embeddings = [key for key in checkpoint.entries if key.endswith(_EMBEDDINGS)]
    if is_tied is True and heads and embeddings and not checkpoint.shards.bits_equal(heads[0], embeddings[0]):
        what = f"differs from {embeddings[0]}, to which config.json ties it"
        yield error("tied", heads[0], what, "set tie_word_embeddings to false, or remove the tensor")
    elif is_tied is False and embeddings and not heads and not _is_unreadable(checkpoint):
        what = "is missing, and config.json does not tie it to the embedding"
        yield error("tied", "lm_head.weight", what, "set tie_word_embeddings to true, or add the tensor")


def check_scales_file(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Checks the scales in `scales.safetensors`, and compares them with those of the checkpoint."""
    file = checkpoint.path / FILE_NAME
    if not file.is_file():
        return
    try:
        scales = read_scales(file)
    except Fp8ServeError as exception:
        yield error("unreadable", FILE_NAME, f"cannot be read ({str(exception).removesuffix('.')})", WRITE_AGAIN)
        return
    for tensor, problem in find_problems(scales):
        yield error("stale", f"{FILE_NAME}: {tensor}", problem, "calibrate the model again")
    for tensor, entry in scales.tensors.items():
        owner, _, role = tensor.rpartition(".")
        key = checkpoint.scale_of(owner, role) if role in ("input", "weight", "k", "v") else None  # type: ignore[arg-type]
        value = None if key is None else checkpoint.value(key)
        scale = float(entry.scale)
        if value is not None and value.numel() == 1 and not abs(scale * float(value) - 1) <= COPY_TOLERANCE:
            what = f"is not the scale that {FILE_NAME} has for it, {1 / scale:.4g}"
            yield error("stale", str(key), what, "write the directory again")


def _is_unreadable(checkpoint: RawCheckpoint, file: str | None = None) -> bool:
    """Returns whether `file`, or any file, could not be read. Its tensors must not be reported as missing."""
    return any(finding.check == "unreadable" and file in (None, finding.tensor) for finding in checkpoint.read_errors)


def check_fp8_without_config(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    is_configured = checkpoint.quantization is not None or any(e.check == "config" for e in checkpoint.read_errors)
    if checkpoint.config is not None and checkpoint.weights and not is_configured:
        key = next(iter(checkpoint.weights.values()))
        what = "is FP8, but config.json has no quantization_config"
        yield error("config", key, what, "add the quantization_config of the tool that wrote the model")


def check_config_without_quantized_weights(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    quantization = checkpoint.quantization
    is_quantized = checkpoint.weights or checkpoint.mx_scales or checkpoint.packed or checkpoint.int4_owners
    if quantization is not None and quantization.schemes and not is_quantized:
        what = f"says that weights are quantized by {quantization.producer}, and none is"
        yield error("config", _CONFIG, what, "remove it, or write the model again")


def check_ignored_layers(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds layers that are FP8 although quantization_config ignores them, and the reverse."""
    quantization = checkpoint.quantization
    if quantization is None:
        return
    for owner, key in checkpoint.weights.items():
        scheme = quantization.find_scheme(owner)
        if quantization.ignores(owner):
            yield error("config", key, f"is FP8, but {_CONFIG} leaves {owner} out", _CORRECT_CONFIG)
        elif scheme is None:
            yield error("config", key, f"is FP8, but no group of {_CONFIG} has {owner}", _CORRECT_CONFIG)
        elif scheme.weight_4bit is not None or scheme.int4 is not None:
            yield error("config", key, f"is FP8, but {_CONFIG} says {scheme.weight_name}", _CORRECT_CONFIG)
    leaves = {owner.rpartition(".")[2] for owner in checkpoint.weights}
    for key, entry in checkpoint.entries.items():
        owner = key.removesuffix(".weight")
        is_matrix = key.endswith(".weight") and len(entry.shape) == 2 and key not in checkpoint.mx_scales
        if (
            not is_matrix
            or owner in checkpoint.weights
            or owner in checkpoint.packed
            or owner.rpartition(".")[2] not in leaves
        ):
            continue
        if not quantization.ignores(owner) and quantization.find_scheme(owner) is not None:
            yield error("config", key, f"is not FP8, but {_CONFIG} does not leave {owner} out", _CORRECT_CONFIG)


def check_input_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds layers with static inputs and no input scale, and layers with dynamic inputs and an input scale."""
    for owner in checkpoint.weights:
        scheme, key = _scheme(checkpoint, owner), checkpoint.scale_of(owner, "input")
        if scheme is None:
            continue
        is_static = scheme.input_spec.source == "stored" and not is_embedding(owner)
        if is_static and key is None:
            what = f"has no input_scale, though {_CONFIG} says that inputs are static"
            yield error("missing", owner, what, "calibrate the model, or choose dynamic inputs")
        elif key is not None and not is_static:
            yield warning("config", key, f"is not used: {_CONFIG} says that inputs are dynamic", "remove it")


def check_weight_blocks(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights without block scales whose inputs are quantized in blocks."""
    for owner in checkpoint.weights:
        scheme, kind = _scheme(checkpoint, owner), checkpoint.granularity(owner)
        has_blocked_input = scheme is not None and scheme.input_spec.granularity == BLOCKED_INPUT.granularity
        is_one_block = kind == "tensor" and max(checkpoint.entries[checkpoint.weights[owner]].shape[-2:]) <= BLOCK
        if kind is not None and has_blocked_input and not (kind == "block128x128" or is_one_block):
            what = f"is one for each {kind}, but {_CONFIG} says blocks of 128 x 128"
            yield error("config", str(checkpoint.scale_of(owner, "weight")), what, _CORRECT_CONFIG)


def check_cache_scheme(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds a `kv_cache_scheme` without KV-cache scales, for which readers use the scale 1."""
    config = (checkpoint.config or {}).get(_CONFIG)
    has_scheme = isinstance(config, dict) and bool(config.get("kv_cache_scheme"))
    if has_scheme and not any(True for _ in checkpoint.with_role(*KV)):
        what = "has a kv_cache_scheme, but no k_scale or v_scale is there"
        yield error("missing", _CONFIG, what, "calibrate the cache, or take the scheme out")


def _scheme(checkpoint: RawCheckpoint, owner: str) -> Scheme | None:
    """Returns the scheme of the layer, or None if it has none, which other checks report."""
    return None if checkpoint.quantization is None else checkpoint.quantization.find_scheme(owner)
