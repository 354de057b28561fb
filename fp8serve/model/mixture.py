"""Mixtures of experts as data: how many there are, how a router chooses, and what files call the parts. No torch."""

from dataclasses import dataclass

from fp8serve.errors import ModelError, shown
from fp8serve.model.config_reader import Reader
from fp8serve.model.families import MixtureNames


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that some layers have for an MLP.

    count: of experts, of which a token goes through `per_token`. size: of each expert's middle. normalizes: the weights
    of the chosen are divided by their sum. wide_weights: they stay FP32 until they multiply, where others round them.
    layers: which have it; the others have a dense MLP. shared_size: of the middle of the expert that every token goes
    through besides; None: there is none.
    """

    names: MixtureNames
    count: int
    per_token: int
    size: int
    normalizes: bool
    wide_weights: bool
    layers: tuple[int, ...]
    shared_size: int | None = None
    weighs_chosen: bool = False  # by the softmax of their logits alone
    bias: bool = False
    interleaved: bool = False  # in files, see families.Mixture
    clamp: tuple[float, float] | None = None  # (limit, alpha) of gpt-oss' activation


def experts_of(get: Reader, layers: int) -> Experts | None:
    """The mixture of the family that `get` reads; None for a dense one, or where no layer has experts."""
    mixture = get.family.mixture
    if mixture is None:
        return None
    count, chosen = _count(get), get.positive("num_experts_per_tok")
    if get("experts_per_token") not in (None, chosen):
        raise get.complain("experts_per_token", get("experts_per_token"), f"{chosen}, as num_experts_per_tok,")
    if chosen > count:
        raise get.complain("num_experts_per_tok", chosen, f"at most the {count} experts")
    found = Experts(
        names=mixture.names,
        count=count,
        per_token=chosen,
        size=get.positive(mixture.size),
        normalizes=get.boolean("norm_topk_prob") if mixture.normalizes is None else mixture.normalizes,
        wide_weights=mixture.wide_weights,
        layers=_sparse(get, layers),
        shared_size=get.positive("shared_expert_intermediate_size") if mixture.names.shared else None,
        weighs_chosen=mixture.weighs_chosen,
        bias=mixture.bias,
        interleaved=mixture.interleaved,
        clamp=None if get("swiglu_limit") is None else (get.number("swiglu_limit"), get.number("swiglu_alpha")),
    )
    return found if found.layers else None


def _count(get: Reader) -> int:
    """transformers has two names for it, and writes either."""
    one, other = (get.raw.get(key) for key in ("num_experts", "num_local_experts"))
    if one is not None and other not in (None, one):
        raise get.complain("num_local_experts", other, f"{shown(one)}, as many as num_experts,")
    return get.positive("num_experts" if other is None else "num_local_experts")


def _sparse(get: Reader, layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step, dense = get.positive("decoder_sparse_step", 1), get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(i, int) for i in dense):
        raise ModelError(f"{get.where}: mlp_only_layers is {shown(dense)} where a list of layers was expected.")
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)
