"""The hyper-parameters of mixtures of experts, read from `config.json`. Does not import torch."""

from dataclasses import dataclass

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.families import MixtureNames
from fp8serve.model.config.reader import Reader

CORRECTION = "e_score_correction_bias"  # the router's parameter that balances the experts' load
_FP32_SUFFIXES = (f".{CORRECTION}", ".act_fn.beta", ".act_fn.eps")  # the last two are constants of xIELU


@dataclass(frozen=True)
class Routing:
    """The parameters of DeepSeek's routers, which choose experts by FP32 scores within the best groups.

    With `sigmoid`, an expert's score is the sigmoid of its logit. The choice adds a correction from the checkpoint to
    the scores, and ranks a group by the sum of its two best experts. Otherwise scores are a softmax, and a group is
    ranked by its best expert.
    """

    scale: float  # multiplies the weights of the chosen experts
    groups: int  # number of groups into which the experts are divided
    chosen_groups: int  # groups from which a token's experts may come
    sigmoid: bool


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that some layers have instead of an MLP."""

    names: MixtureNames
    count: int  # number of experts
    per_token: int  # number of experts that compute each token
    size: int  # intermediate size of each expert
    normalizes: bool  # the weights of the chosen experts are divided by their sum
    fp32_routing_weights: bool  # these weights stay FP32 when they multiply the experts' outputs
    layers: tuple[int, ...]  # the layers that have the mixture; the others have a dense MLP
    shared_size: int | None = None  # intermediate size of the shared expert, if there is one
    softmax_over_chosen: bool = False  # the softmax is over the logits of the chosen experts only
    bias: bool = False
    interleaved: bool = False  # see family.Mixture
    clamp: tuple[float, float] | None = None  # (limit, alpha) of gpt-oss' activation
    routing: Routing | None = None  # of DeepSeek
    # With sparsemixer, the softmax has the experts whose logits are at most this fraction below the best one.
    sparsemixer_threshold: float | None = None


def needs_fp32(name: str) -> bool:
    """Returns whether the parameter stays in FP32, whatever the model's dtype, and is not trained."""
    return name.endswith(_FP32_SUFFIXES)


def read_experts(get: Reader, layers: int) -> Experts | None:
    """Returns the mixture of experts in config.json, or None if no layer has experts."""
    mixture = get.family.mixture
    if mixture is None:
        return None
    count, per_token = _count(get), get.positive("num_experts_per_tok")
    if get("experts_per_token") not in (None, per_token):
        raise get.unexpected("experts_per_token", get("experts_per_token"), f"{per_token}, as num_experts_per_tok,")
    if per_token > count:
        raise get.unexpected("num_experts_per_tok", per_token, f"at most the {count} experts")
    experts = Experts(
        names=mixture.names,
        count=count,
        per_token=per_token,
        size=get.positive(mixture.size),
        normalizes=get.boolean("norm_topk_prob") if mixture.normalizes is None else mixture.normalizes,
        fp32_routing_weights=mixture.fp32_routing_weights,
        layers=_sparse_layers(get, layers),
        shared_size=_shared_size(get),
        softmax_over_chosen=mixture.softmax_over_chosen,
        bias=mixture.bias,
        interleaved=mixture.interleaved,
        clamp=None if get("swiglu_limit") is None else (get.number("swiglu_limit"), get.number("swiglu_alpha")),
        routing=None if mixture.sigmoid is None else _routing(get, mixture.sigmoid, count, per_token),
        sparsemixer_threshold=_sparsemixer_threshold(get, per_token) if mixture.sparsemixer else None,
    )
    return experts if experts.layers else None


def _count(get: Reader) -> int:
    """Returns the number of experts. transformers writes either `num_experts` or `num_local_experts`."""
    if "n_routed_experts" in get.family.optional:
        return get.positive("n_routed_experts")
    count, local_count = (get.raw.get(key) for key in ("num_experts", "num_local_experts"))
    if count is not None and local_count not in (None, count):
        raise get.unexpected("num_local_experts", local_count, f"{shown(count)}, as many as num_experts,")
    return get.positive("num_experts" if local_count is None else "num_local_experts")


def _sparse_layers(get: Reader, layers: int) -> tuple[int, ...]:
    """Returns the layers with experts: those from `first_k_dense_replace` on, or else every `decoder_sparse_step`-th
    layer except those in `mlp_only_layers`."""
    if (first := get("first_k_dense_replace")) is not None:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise get.unexpected("first_k_dense_replace", first, "a whole number from 0 on")
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


def _routing(get: Reader, sigmoid: bool, count: int, per_token: int) -> Routing:
    """Returns DeepSeek's routing. V3 always has groups of experts; `topk_method` says whether V2 has them."""
    groups = chosen_groups = 1
    if sigmoid or get("topk_method") == "group_limited_greedy":
        groups, chosen_groups = get.positive("n_group", 1), get.positive("topk_group", 1)
    elif get("topk_method") != "greedy":
        raise get.unexpected("topk_method", get("topk_method"), "'greedy' or 'group_limited_greedy'")
    if count % groups:
        raise get.unexpected("n_group", groups, f"a divisor of the {count} experts")
    if sigmoid and count // groups < 2:
        raise get.unexpected("n_group", groups, f"a number that leaves two of the {count} experts in a group")
    if chosen_groups > groups or chosen_groups * (count // groups) < per_token:
        raise get.unexpected("topk_group", chosen_groups, f"at most n_group {groups} and room for {per_token} experts")
    return Routing(get.number("routed_scaling_factor"), groups, chosen_groups, sigmoid)


def _sparsemixer_threshold(get: Reader, per_token: int) -> float:
    """Returns twice `router_jitter_noise`, which sparsemixer also uses in inference."""
    if per_token != 2:
        raise get.unexpected("num_experts_per_tok", per_token, "2, the number of experts that sparsemixer chooses,")
    noise = get("router_jitter_noise")
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < 1:
        raise get.unexpected("router_jitter_noise", noise, "a number from 0 to below 1")
    return 2.0 * noise
