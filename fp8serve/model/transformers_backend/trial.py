"""What a class of transformers requires of attention, from one pass on "meta", which computes only shapes.

Windows are read from the class's masks: transformers builds every mask with a function of two positions, which is
compared with "causal" and with "causal, with a window". A class with other masks, one that attends without
transformers' interface, or one with a term between its last layer and its logits is refused, because its answers would
be wrong.

When weights are loaded, `check_against_class` compares the model with its class: two short sequences, packed by us and
one by one by transformers. This detects a class in which tokens interact outside attention, or which takes positions
from elsewhere. Rounding, and FP8 scales that two sequences share, cause differences of a few percent; a missing term
causes more. In a mixture, rounding may send a token that is nearly undecided between two experts to the other one,
whose output differs. So our pass gets the experts that the class chose, and every token is compared; most of our own
choices must be the same.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fp8serve.errors import ModelError, shown
from fp8serve.fp8.attention import causal_attention
from fp8serve.model.config.model_config import ModelConfig, TransformersClass
from fp8serve.model.config.reader import token_ids
from fp8serve.model.network.decoder import rotated
from fp8serve.model.network.experts import mixtures
from fp8serve.model.transformers_backend.network import (
    OWN_ATTENTION,
    SERVED,
    TRIED,
    Mask,
    Seen,
    TransformersModel,
    answering,
    build,
)

TOKENS = 4
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")
BY_VALUES = (
    "{} cannot be served: transformers' class decides by the values of its tensors how it computes, and fp8serve "
    "checks a class before it reads weights."
)
_COMPUTED = {"scaling", "softcap", "sliding_window"}
_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache_position",
             "is_causal", "layer_idx", "return_dict", "output_router_logits"}  # fmt: skip
LENGTHS = [5, 9]
TOLERANCE = 0.2  # relative to the norm of a token's hidden state
MOST = 0.5  # fraction of the choices of experts
ChosenExperts = tuple[Tensor, Tensor]  # (experts, their weights), as a mixture's experts are called with
Hook = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class AttentionCall:
    """What one attention layer asked for. heads: (of queries, of keys, elements of each)."""

    heads: tuple[int, int, int]
    scale: float
    window: int | None
    softcap: float | None


def describe(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """The configuration of a model that transformers builds. ModelError: it cannot be served, and why."""
    return _describe(json.dumps(raw, sort_keys=True), json.dumps(generation, sort_keys=True), where)


@cache
def _describe(config_json: str, generation_json: str, where: str) -> ModelConfig:
    raw, generation = json.loads(config_json), json.loads(generation_json)
    model: Any = build(config_json, attention=TRIED)
    name, config = type(model).__name__, model.config.get_text_config()
    if others := [other for other in raw.get("architectures") or () if other != name]:
        raise ModelError(f"{where}: the architecture {shown(others[0])} is not that of {name}.")
    _check_rope(config, name, where)
    calls = trial(model)
    if (longest := _longest(config)) is None:
        raise ModelError(f"{where} names no longest context of {name}; add max_position_embeddings.")
    if len(calls) != config.num_hidden_layers:
        raise ModelError(
            f"{where}: {name} calls transformers' attention interface {_times(len(calls))} in "
            f"{config.num_hidden_layers} layers, and a cache serves one call a layer."
        )
    if len({(call.heads, call.softcap) for call in calls}) > 1:
        raise ModelError(f"{where}: the attention layers of {name} differ in their heads, which is not supported.")
    eos = generation.get("eos_token_id")
    eos = raw.get("eos_token_id") if eos is None else eos
    begin = token_ids(raw.get("bos_token_id"), "bos_token_id", where)
    return ModelConfig(
        architecture=name,
        model_type=str(raw["model_type"]),
        **_sizes(model, calls[0]),
        num_layers=len(calls),
        max_position_embeddings=longest,
        layer_windows=tuple(call.window for call in calls),
        layer_ropes=(None,) * len(calls),
        bos_token_id=next(iter(begin), None),
        eos_token_ids=token_ids(eos, "eos_token_id", where),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
        softmax_scale=calls[0].scale,
        attention_softcap=calls[0].softcap,
        computed_by=TransformersClass(config_json, tuple(call.scale for call in calls)),
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _sizes(model: Any, call: AttentionCall) -> dict[str, Any]:
    head, (heads, kv_heads, head_dim) = model.get_output_embeddings(), call.heads
    unused = dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "qk_norm"), False)
    return unused | {
        "vocab_size": head.out_features,
        "hidden_size": head.in_features,
        "intermediate_size": int(getattr(model.config, "intermediate_size", None) or 4 * head.in_features),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 0.0,
        "tie_word_embeddings": head.weight is model.get_input_embeddings().weight,
    }


def trial(model: Any) -> list[AttentionCall]:
    """The calls of attention in one pass over a few tokens, in their order."""
    calls: list[AttentionCall] = []
    name, longest = type(model).__name__, _longest(model.config.get_text_config()) or TOKENS

    def answer(number: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Any) -> Tensor:
        _check_call(name, module, q, v, mask, options)
        scale = options.get("scaling")
        heads = q.shape[1], k.shape[1], q.shape[3]
        window = _window(mask.sees, name, longest)
        calls.append(
            AttentionCall(heads, heads[2] ** -0.5 if scale is None else float(scale), window, options.get("softcap"))
        )
        return q[0].transpose(0, 1)

    try:
        with torch.no_grad(), answering(answer), _ending_in_its_head(model, name):
            tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
            # with a mask that hides nothing, or the class looks for several sequences among the positions
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except ModelError:
        raise
    except Exception as problem:  # raised by a class that does not expect this
        by_values = "meta tensor" in str(problem)
        raise ModelError((BY_VALUES if by_values else OWN_ATTENTION).format(name)) from problem
    return calls


@contextmanager
def _ending_in_its_head(model: Any, name: str) -> Iterator[None]:
    """ModelError where a pass inside does anything but the head's product between the last layer and the logits.

    The pass gets numbers on the CPU for the hidden states and for the head's product, and must not change them.
    """
    base, head = getattr(model, model.base_model_prefix), model.get_output_embeddings()
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TOKENS, head.in_features, generator=random)
    product = 100 * torch.randn(1, TOKENS, head.out_features, generator=random)
    before = ModelError(
        f"{name} changes the hidden states before its head, which only fp8serve's own decoders support."
    )
    behind = ModelError(f"{name} changes the logits behind its last layer, which only fp8serve's own decoders support.")
    expected: list[ModelError] = []  # of a failure at this point of the pass

    def leave_base(module: nn.Module, args: Any, out: Any) -> None:
        expected.append(before)
        out.last_hidden_state = hidden

    def enter_head(module: nn.Module, args: Any) -> Any:
        if expected and not torch.equal(args[0], hidden):  # a class may call the parts of its base by themselves
            raise before
        expected.append(behind)
        return (args[0].to("meta"),)

    def check_logits(module: nn.Module, args: Any, out: Any) -> None:
        if not torch.equal(out.logits, product):
            raise behind

    hooks = [
        base.register_forward_hook(leave_base),
        head.register_forward_pre_hook(enter_head),
        head.register_forward_hook(lambda module, args, out: product),
        model.register_forward_hook(check_logits),
    ]
    try:
        yield
    except Exception as problem:
        if not expected or isinstance(problem, ModelError):
            raise
        raise expected[-1] from problem  # numbers on the CPU met parameters without any
    finally:
        for hook in hooks:
            hook.remove()


def _check_call(
    name: str, module: nn.Module, query: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
) -> None:
    if getattr(module, "is_causal", True) is not True:
        raise ModelError(f"{name} has attention that is not causal, which no cache can serve.")
    if not isinstance(mask, Mask):
        raise ModelError(f"{name} makes attention masks of its own, from which the visible tokens cannot be read.")
    if value.shape[3] != query.shape[3] or query.shape[3] % 2:
        raise ModelError(
            f"{name} has heads of {query.shape[3]} and {value.shape[3]} elements, which the cache does not hold."
        )
    for key, option in options.items():
        if key not in _COMPUTED | _HARMLESS and option is not None:
            raise ModelError(f"{name} gives attention the option {key}, which is not supported.")


def _window(sees: Seen, name: str, longest: int) -> int | None:
    """The number of positions that a query sees, including its own, which is the last; None: all before it."""
    keys = torch.arange(longest)

    def row(query: int) -> Tensor:
        return sees(torch.full_like(keys, query), keys).expand(longest)

    window = int(row(longest - 1).sum())
    for query in {0, 1, min(window, longest - 1), longest // 2, longest - 1}:
        if not torch.equal(row(query), (keys <= query) & (keys > query - window)):
            raise ModelError(f"{name} has a mask that is neither causal nor a window, which is not supported.")
    return None if window == longest else window


def _longest(config: Any) -> int | None:
    """The longest context of the model, if its configuration names it."""
    return next((value for key in _LENGTH_KEYS if isinstance(value := getattr(config, key, None), int)), None)


def _check_rope(config: Any, name: str, where: str) -> None:
    """Frequencies that depend on the length of a sequence would change under the keys in a cache."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in {str(kind_config.get("rope_type")) for kind_config in kinds} & {"dynamic", "longrope"}:
        raise ModelError(
            f"{where}: {name} uses rotary scaling of type {shown(kind)}, which only fp8serve's own decoders support."
        )


@torch.no_grad()
def check_against_class(model: TransformersModel) -> None:
    """ModelError: the class computes something different."""
    name, device = model.config.architecture, model.embedding.weight.device
    ids = torch.randint(model.config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    sequences = list(torch.split(ids.to(device), LENGTHS))
    chosen: dict[str, list[ChosenExperts]] = {mixture: [] for mixture in mixtures(model)}
    with _hooked(model, lambda mixture: lambda module, args: chosen[mixture].append(args[1:])):
        theirs = [_hidden_of_class(model, sequence) for sequence in sequences]
    agree: list[Tensor] = []
    with _hooked(model, lambda mixture: _impose(chosen[mixture], agree)):
        result = _hidden_of_model(model, sequences).float()
    expected = torch.cat(theirs)
    near = (result - expected).norm(dim=-1) <= TOLERANCE * expected.norm(dim=-1)
    if not near.all() or (agree and float(torch.cat(agree).float().mean()) < MOST):
        raise ModelError(f"{name} gives other hidden states by our attention than by transformers' own.")


@contextmanager
def _hooked(model: TransformersModel, hook: Callable[[str], Hook]) -> Iterator[None]:
    """Inside the context, the experts of every mixture are called through a hook."""
    hooks = [experts.register_forward_pre_hook(hook(name)) for name, experts in mixtures(model).items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _impose(choices: list[ChosenExperts], agree: list[Tensor]) -> Hook:
    """Replaces the choices of one pass by those of all sequences, and records which are the same."""
    chosen, weights = (torch.cat(parts) for parts in zip(*choices, strict=True))

    def hook(module: nn.Module, args: Any) -> tuple[Tensor, Tensor, Tensor]:
        agree.append((args[1].sort(-1).values == chosen.sort(-1).values).all(-1))
        return args[0], chosen, weights

    return hook


def _hidden_of_model(model: TransformersModel, sequences: list[Tensor]) -> Tensor:
    """Hidden states of all sequences in one pass."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, LENGTHS, *model.attention_options(layer))

    positions = torch.cat([torch.arange(len(sequence), device=sequence.device) for sequence in sequences])
    return model(torch.cat(sequences), positions, rotated(attend))  # type: ignore[no-any-return]


def _hidden_of_class(model: TransformersModel, sequence: Tensor) -> Tensor:
    """The hidden states that the class by itself gives its head."""
    built: Any = model.whole[0]
    seen: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    try:
        built.set_attn_implementation("eager")
        built(input_ids=sequence[None], use_cache=False)
    finally:
        hook.remove()
        built.set_attn_implementation(SERVED)
    return seen[0].float()


def main() -> None:
    """The other side of `ask` in config/decoder.py: the arguments of `describe` from stdin, its answer on stdout, JSON.

    The answer has the fields without a default and those that differ from their default.
    """
    with contextlib.redirect_stdout(sys.stderr):  # for what transformers has to say
        try:
            config = describe(*json.load(sys.stdin))
        except ModelError as error:
            answer: dict[str, Any] = {"refused": str(error)}
        else:
            plain = asdict(config)
            answer = {"fields": {f.name: plain[f.name] for f in fields(config) if getattr(config, f.name) != f.default}}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
