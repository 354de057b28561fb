"""Mixtures of experts as data: how many there are, how a router chooses, and what files call the parts. No torch."""

from dataclasses import dataclass

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.family import MixtureNames
from fp8serve.model.config.reader import Reader

CORRECTION = "e_score_correction_bias"
_FP32_SUFFIXES = (f".{CORRECTION}", ".act_fn.beta", ".act_fn.eps")  # the last two are constants of xIELU


@dataclass(frozen=True)
class Routing:
    """How DeepSeek's routers choose, from logits in FP32.

    scale: multiplies the weights of the chosen experts. groups, kept: experts are divided into `groups` groups, of
    which a token keeps the best `kept`. sigmoid: scores are the sigmoids of single logits; a correction from the file
    is added for the choice only, and a group counts as much as its best two experts. Else scores are a softmax, and a
    group counts as much as its best expert.
    """

    scale: float
    groups: int
    chosen_groups: int
    sigmoid: bool


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that some layers have in place of an MLP.

    count: the number of experts; a token goes through `per_token` of them. size: each expert's intermediate size.
    normalizes: the weights of the chosen experts are divided by their sum. wide_weights: these weights stay FP32 for
    the product, where others round them. layers: whether each layer has the mixture; the others have a dense MLP.
    shared_size: intermediate size of the shared expert, through which every token goes; None: there is none.
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
    interleaved: bool = False  # in files, see family.Mixture
    clamp: tuple[float, float] | None = None  # (limit, alpha) of gpt-oss' activation
    routing: Routing | None = None  # DeepSeek's
    closeness: float | None = None  # sparsemixer's: how close to the best an expert must be to share its weight


def keeps_fp32(name: str) -> bool:
    """Whether the parameter of this name stays in FP32 whatever the type of the others, and is not trained."""
    return name.endswith(_FP32_SUFFIXES)


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
    experts = Experts(
        names=mixture.names,
        count=count,
        per_token=chosen,
        size=get.positive(mixture.size),
        normalizes=get.boolean("norm_topk_prob") if mixture.normalizes is None else mixture.normalizes,
        wide_weights=mixture.wide_weights,
        layers=_sparse(get, layers),
        shared_size=_shared_size(get),
        weighs_chosen=mixture.weighs_chosen,
        bias=mixture.bias,
        interleaved=mixture.interleaved,
        clamp=None if get("swiglu_limit") is None else (get.number("swiglu_limit"), get.number("swiglu_alpha")),
        routing=None if mixture.sigmoid is None else _routing(get, mixture.sigmoid, count, chosen),
        closeness=_closeness(get, chosen) if mixture.sparsemixer else None,
    )
    return experts if experts.layers else None


def _count(get: Reader) -> int:
    """transformers has two names for the key, and writes either."""
    if "n_routed_experts" in get.family.optional:
        return get.positive("n_routed_experts")
    one, other = (get.raw.get(key) for key in ("num_experts", "num_local_experts"))
    if one is not None and other not in (None, one):
        raise get.complain("num_local_experts", other, f"{shown(one)}, as many as num_experts,")
    return get.positive("num_experts" if other is None else "num_local_experts")


def _sparse(get: Reader, layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    if (first := get("first_k_dense_replace")) is not None:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise get.complain("first_k_dense_replace", first, "a whole number from 0 on")
        return tuple(range(first, layers))
    step, dense = get.positive("decoder_sparse_step", 1), get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(i, int) for i in dense):
        raise ModelError(f"{get.where}: mlp_only_layers is {shown(dense)} where a list of layers was expected.")
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)


def _shared_size(get: Reader) -> int | None:
    mixture = get.family.mixture
    if mixture is None or mixture.names.shared is None:
        return None
    if "n_shared_experts" in get.family.optional:
        return get.positive("n_shared_experts") * get.positive(mixture.size)
    return get.positive("shared_expert_intermediate_size")


def _routing(get: Reader, sigmoid: bool, count: int, chosen: int) -> Routing:
    """`topk_method` says whether V2 has groups; V3 always has them."""
    groups = chosen_groups = 1
    if sigmoid or get("topk_method") == "group_limited_greedy":
        groups, chosen_groups = get.positive("n_group", 1), get.positive("topk_group", 1)
    elif get("topk_method") != "greedy":
        raise get.complain("topk_method", get("topk_method"), "'greedy' or 'group_limited_greedy'")
    if count % groups:
        raise get.complain("n_group", groups, f"a divisor of the {count} experts")
    if sigmoid and count // groups < 2:
        raise get.complain("n_group", groups, f"a number that leaves two of the {count} experts in a group")
    if chosen_groups > groups or chosen_groups * (count // groups) < chosen:
        raise get.complain("topk_group", chosen_groups, f"at most n_group {groups} and room for {chosen} experts")
    return Routing(get.number("routed_scaling_factor"), groups, chosen_groups, sigmoid)


def _closeness(get: Reader, chosen: int) -> float:
    """Twice `router_jitter_noise`, which here belongs to routing itself, not only to training."""
    if chosen != 2:
        raise get.complain("num_experts_per_tok", chosen, "2, which is what sparsemixer chooses,")
    noise = get("router_jitter_noise")
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < 1:
        raise get.complain("router_jitter_noise", noise, "a number from 0 to below 1")
    return 2.0 * noise
