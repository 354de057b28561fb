"""Checkpoints of torchao 0.14 and later: `quant_method: torchao`, tensor subclasses flattened into safetensors.

    P._weight_qdata  E4M3 [N, K]                the FP8 values of P.weight
    P._weight_scale  FP32 [N, 1], [1, 1] or [N / 128, K / 128], dequantizes

and alike for a stack of experts, `mlp.experts._gate_up_proj_qdata` [E, N, K]. They are renamed as in other projects:
`P.weight` and `P.weight_scale`. `quant_type` in config.json says how inputs are quantized: a configuration class of
torchao and its fields, as JSON. torchao has only dynamic inputs; a scale per tensor is read as one per token, so that
an answer does not depend on its neighbours. Bounds on the inputs and separate configurations for single layers are
refused.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.fp8.spec import UNQUANTIZED, QuantSpec
from fp8serve.model.storage.shards import Shards

METHOD = "torchao"
_FLAT = re.compile(r"(.*)\._(\w+)_(qdata|scale)")
_WEIGHTS_ALONE, _DYNAMIC = "Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"
_INPUTS = {"PerRow": QuantSpec(granularity="row"), "PerTensor": QuantSpec(granularity="row"),
           "PerBlock": QuantSpec(granularity="block1x128")}  # fmt: skip
_BLOCKS = ([1, 128], [128, 128])


def plain_name(key: str, keys: Iterable[str]) -> str:
    """`key` under the name of other projects; a tensor's FP8 values and its scale come together."""
    match = _FLAT.fullmatch(key)
    if match is None or not {f"{match[1]}._{match[2]}_{part}" for part in ("qdata", "scale")} <= set(keys):
        return key
    return f"{match[1]}.{match[2]}{'_scale' if match[3] == 'scale' else ''}"


def plain_names(shards: Shards) -> Shards:
    """The same tensors under the names of other projects. ModelError: two get the same name."""
    keys = frozenset(key for key in shards if _FLAT.fullmatch(key))
    return shards.renamed({key: plain_name(key, keys) for key in shards}) if keys else shards


def input_spec(quant_type: Any, refuse: Callable[[str, Any], ModelError]) -> QuantSpec:
    """How inputs are quantized, of config.json's `quant_type`. refuse: the error for (what, what was found)."""
    whole = quant_type.get("default") if isinstance(quant_type, Mapping) and set(quant_type) == {"default"} else None
    kind = whole.get("_type") if isinstance(whole, Mapping) else None
    if not isinstance(whole, Mapping) or kind not in (_WEIGHTS_ALONE, _DYNAMIC):
        raise refuse("quant_type", kind or quant_type)
    data = whole.get("_data")
    if not isinstance(data, Mapping):
        raise refuse("quant_type", whole)
    for key in ("activation_value_lb", "activation_value_ub"):
        if data.get(key) is not None:
            raise refuse(key, data[key])
    return UNQUANTIZED if kind == _WEIGHTS_ALONE else _dynamic(data.get("granularity"), refuse)


def _dynamic(granularity: Any, refuse: Callable[[str, Any], ModelError]) -> QuantSpec:
    """[of the input, of the weight]; the weight's follows from its scales."""
    both = granularity if isinstance(granularity, list) and len(granularity) == 2 else [granularity] * 2
    kinds = [one.get("_type") if isinstance(one, Mapping) else one for one in both]
    if kinds == [None, None]:  # torchao's default
        return _INPUTS["PerTensor"]
    if kinds[0] != kinds[1] or kinds[0] not in _INPUTS:
        raise refuse("granularity", kinds)
    if kinds[0] == "PerBlock":
        for one, block in zip(both, _BLOCKS, strict=True):
            if list((one.get("_data") or {}).get("block_size") or ()) != block:
                raise refuse("block_size", shown(one))
    return _INPUTS[kinds[0]]
