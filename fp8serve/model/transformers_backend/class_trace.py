"""Derives a `ModelConfig` from transformers' model class, by one forward pass on "meta", and checks the loaded model.

The pass records the arguments of every attention call. transformers computes a mask from a function of two positions;
this module compares the function with a causal mask and with a sliding window. It raises ModelError for a class with
another mask, with attention outside transformers' attention interface, or with an operation between its last layer and
its logits other than the head, because fp8serve would compute wrong logits.

When weights are loaded, `check_against_class` compares the model's hidden states with those of the class for two short
sequences, which fp8serve packs into one pass. This detects a class in which tokens interact outside attention, or that
ignores the given positions. Rounding, and FP8 scales that the packed sequences share, cause differences of a few
percent; a missing operation causes larger ones. Rounding may also send a token to another expert, so our pass uses the
experts that the class chose, and most choices of our own routing must equal them.
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
from fp8serve.model.config.model_config import ModelConfig, TransformersClass, is_expert
from fp8serve.model.config.reader import token_ids
from fp8serve.model.network.decoder import make_attend
from fp8serve.model.network.experts import mixtures
from fp8serve.model.transformers_backend.network import (
    OWN_ATTENTION,
    SERVING_ATTENTION,
    TRACING_ATTENTION,
    Mask,
    MaskFunction,
    TransformersModel,
    build,
    class_linear_names,
    handle_attention,
)

TRACE_TOKENS = 4
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")
VALUE_DEPENDENT = (
    "{} cannot be served: the control flow of transformers' class depends on the values of its tensors, and fp8serve "
    "traces a class without weights."
)
_SUPPORTED_OPTIONS = {"scaling", "softcap", "sliding_window"}
_IGNORED_OPTIONS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
                    "cache_position", "is_causal", "layer_idx", "return_dict", "output_router_logits"}  # fmt: skip
CHECK_LENGTHS = [5, 9]  # tokens of the two sequences of `check_against_class`
TOLERANCE = 0.2  # relative to the norm of a token's hidden state
MIN_EQUAL_CHOICES = 0.5  # fraction of tokens whose experts must be those that the class chose
ChosenExperts = tuple[Tensor, Tensor]  # (indices of experts, their weights), as routers return them
Hook = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class AttentionCall:
    """The recorded properties of one attention call."""

    heads: tuple[int, int, int]  # (query heads, key heads, head_dim)
    scale: float
    window: int | None
    softcap: float | None


def describe(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the configuration of a model that transformers builds. Raises ModelError if it cannot be served.

    `raw` and `generation` are the contents of config.json and generation_config.json, and `where` names the directory.
    """
    return _describe(json.dumps(raw, sort_keys=True), json.dumps(generation, sort_keys=True), where)


@cache
def _describe(config_json: str, generation_json: str, where: str) -> ModelConfig:
    raw, generation = json.loads(config_json), json.loads(generation_json)
    model: Any = build(config_json, attention=TRACING_ATTENTION)
    name, config = type(model).__name__, model.config.get_text_config()
    if unexpected := [architecture for architecture in raw.get("architectures") or () if architecture != name]:
        raise ModelError(f"{where} names the architecture {shown(unexpected[0])}, but its model_type builds {name}.")
    _check_rope(config, name, where)
    calls = trace_attention(model)
    if (max_length := _max_length(config)) is None:
        raise ModelError(f"{where} does not state the context length of {name}; add max_position_embeddings.")
    if len(calls) != config.num_hidden_layers:
        times = "once" if len(calls) == 1 else f"{len(calls)} times"
        raise ModelError(
            f"{where}: {name} calls transformers' attention interface {times} in {config.num_hidden_layers} layers, "
            "and the KV cache needs one call in each layer."
        )
    if len({(call.heads, call.softcap) for call in calls}) > 1:
        raise ModelError(f"{where}: the attention layers of {name} differ in their heads, which is not supported.")
    eos = generation.get("eos_token_id")
    eos = raw.get("eos_token_id") if eos is None else eos
    bos_ids = token_ids(raw.get("bos_token_id"), "bos_token_id", where)
    return ModelConfig(
        architecture=name,
        model_type=str(raw["model_type"]),
        **_sizes(model, calls[0]),
        num_layers=len(calls),
        max_position_embeddings=max_length,
        layer_windows=tuple(call.window for call in calls),
        layer_ropes=(None,) * len(calls),
        bos_token_id=next(iter(bos_ids), None),
        eos_token_ids=token_ids(eos, "eos_token_id", where),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
        softmax_scale=calls[0].scale,
        attention_softcap=calls[0].softcap,
        computed_by=TransformersClass(
            config_json,
            softmax_scales=tuple(call.scale for call in calls),
            adaptable_linears=tuple(name for name in class_linear_names(model) if not is_expert(name)),
        ),
    )


def _sizes(model: Any, call: AttentionCall) -> dict[str, Any]:
    head, (heads, kv_heads, head_dim) = model.get_output_embeddings(), call.heads
    unused_flags = dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "qk_norm"), False)
    return unused_flags | {
        "vocab_size": head.out_features,
        "hidden_size": head.in_features,
        "intermediate_size": int(getattr(model.config, "intermediate_size", None) or 4 * head.in_features),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 0.0,
        "tie_word_embeddings": head.weight is model.get_input_embeddings().weight,
    }


def trace_attention(model: Any) -> list[AttentionCall]:
    """Runs a few tokens on "meta" and returns the attention calls in their order."""
    calls: list[AttentionCall] = []
    name, max_length = type(model).__name__, _max_length(model.config.get_text_config()) or TRACE_TOKENS

    def handler(layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Any) -> Tensor:
        _check_call(name, module, q, v, mask, options)
        scale = options.get("scaling")
        heads = q.shape[1], k.shape[1], q.shape[3]
        window = _window(mask.is_visible, name, max_length)
        calls.append(
            AttentionCall(heads, heads[2] ** -0.5 if scale is None else float(scale), window, options.get("softcap"))
        )
        return q[0].transpose(0, 1)

    try:
        with torch.no_grad(), handle_attention(handler), _check_operations_after_layers(model, name):
            tokens = torch.zeros(1, TRACE_TOKENS, dtype=torch.long, device="meta")
            # without this mask, transformers derives packed sequences from the values of the positions
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except ModelError:
        raise
    except Exception as error:  # the class's own code may raise anything
        is_value_dependent = "meta tensor" in str(error)
        raise ModelError((VALUE_DEPENDENT if is_value_dependent else OWN_ATTENTION).format(name)) from error
    return calls


@contextmanager
def _check_operations_after_layers(model: Any, name: str) -> Iterator[None]:
    """Raises ModelError if the pass in the block has another operation than the head after its last layer. Hooks
    replace the hidden states and the head's output by random CPU tensors and check that nothing changes them."""
    base, head = getattr(model, model.base_model_prefix), model.get_output_embeddings()
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TRACE_TOKENS, head.in_features, generator=random)
    product = 100 * torch.randn(1, TRACE_TOKENS, head.out_features, generator=random)
    hidden_error = ModelError(
        f"{name} changes the hidden states before its head, which only fp8serve's own decoders support."
    )
    logits_error = ModelError(f"{name} changes the logits after its head, which only fp8serve's own decoders support.")
    reached: list[ModelError] = []  # the last one explains a failure at this point of the pass

    def replace_hidden(module: nn.Module, args: Any, out: Any) -> None:
        reached.append(hidden_error)
        out.last_hidden_state = hidden

    def check_hidden(module: nn.Module, args: Any) -> Any:
        if reached and not torch.equal(args[0], hidden):  # a class may call the head without calling its base
            raise hidden_error
        reached.append(logits_error)
        return (args[0].to("meta"),)

    def check_logits(module: nn.Module, args: Any, out: Any) -> None:
        if not torch.equal(out.logits, product):
            raise logits_error

    hooks = [
        base.register_forward_hook(replace_hidden),
        head.register_forward_pre_hook(check_hidden),
        head.register_forward_hook(lambda module, args, out: product),
        model.register_forward_hook(check_logits),
    ]
    try:
        yield
    except Exception as error:
        if not reached or isinstance(error, ModelError):
            raise
        raise reached[-1] from error  # an operation of a CPU tensor with a parameter on "meta"
    finally:
        for hook in hooks:
            hook.remove()


def _check_call(
    name: str, module: nn.Module, query: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
) -> None:
    if getattr(module, "is_causal", True) is not True:
        raise ModelError(f"{name} has attention that is not causal, which does not work with a KV cache.")
    if not isinstance(mask, Mask):
        raise ModelError(f"{name} makes attention masks of its own, from which the visible tokens cannot be read.")
    if value.shape[3] != query.shape[3] or query.shape[3] % 2:
        raise ModelError(
            f"{name} has query heads of {query.shape[3]} and value heads of {value.shape[3]} elements, which the KV "
            "cache does not support."
        )
    for key, option in options.items():
        if key not in _SUPPORTED_OPTIONS | _IGNORED_OPTIONS and option is not None:
            raise ModelError(f"{name} passes the option {key} to attention, which is not supported.")


def _window(is_visible: MaskFunction, name: str, max_length: int) -> int | None:
    """Returns the size of the sliding window, which includes the query's position, or None for a causal mask."""
    keys = torch.arange(max_length)

    def row(query: int) -> Tensor:
        return is_visible(torch.full_like(keys, query), keys).expand(max_length)

    window = int(row(max_length - 1).sum())
    for query in {0, 1, min(window, max_length - 1), max_length // 2, max_length - 1}:
        if not torch.equal(row(query), (keys <= query) & (keys > query - window)):
            raise ModelError(f"{name} has a mask that is neither causal nor a window, which is not supported.")
    return None if window == max_length else window


def _max_length(config: Any) -> int | None:
    return next((value for key in _LENGTH_KEYS if isinstance(value := getattr(config, key, None), int)), None)


def _check_rope(config: Any, name: str, where: str) -> None:
    """Raises ModelError if rotary frequencies depend on the sequence's length, because cached keys stay as they are."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in {str(kind_config.get("rope_type")) for kind_config in kinds} & {"dynamic", "longrope"}:
        raise ModelError(
            f"{where}: {name} uses rotary scaling of type {shown(kind)}, which only fp8serve's own decoders support."
        )


@torch.no_grad()
def check_against_class(model: TransformersModel) -> None:
    """Raises ModelError if transformers' class computes other hidden states than the loaded model."""
    name, device = model.config.architecture, model.embedding.weight.device
    ids = torch.randint(model.config.vocab_size, (sum(CHECK_LENGTHS),), generator=torch.Generator().manual_seed(0))
    sequences = list(torch.split(ids.to(device), CHECK_LENGTHS))
    chosen: dict[str, list[ChosenExperts]] = {mixture: [] for mixture in mixtures(model)}
    with _expert_hooks(model, lambda mixture: lambda module, args: chosen[mixture].append(args[1:])):
        expected = torch.cat([_hidden_of_class(model, sequence) for sequence in sequences])
    equal_choices: list[Tensor] = []
    with _expert_hooks(model, lambda mixture: _replace_choices(chosen[mixture], equal_choices)):
        result = _hidden_of_model(model, sequences).float()
    is_close = (result - expected).norm(dim=-1) <= TOLERANCE * expected.norm(dim=-1)
    if not is_close.all() or (equal_choices and float(torch.cat(equal_choices).float().mean()) < MIN_EQUAL_CHOICES):
        raise ModelError(
            f"{name} cannot be served: its hidden states with fp8serve's attention differ from those of transformers' "
            "own class."
        )


@contextmanager
def _expert_hooks(model: TransformersModel, hook: Callable[[str], Hook]) -> Iterator[None]:
    """Inside the block, the experts of every mixture have the forward pre-hook that `hook` returns for their name."""
    hooks = [experts.register_forward_pre_hook(hook(name)) for name, experts in mixtures(model).items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _replace_choices(choices: list[ChosenExperts], equal_choices: list[Tensor]) -> Hook:
    """Returns a hook that passes the experts of `choices` to a mixture and records which tokens chose the same ones."""
    chosen, weights = (torch.cat(parts) for parts in zip(*choices, strict=True))

    def hook(module: nn.Module, args: Any) -> tuple[Tensor, Tensor, Tensor]:
        equal_choices.append((args[1].sort(-1).values == chosen.sort(-1).values).all(-1))
        return args[0], chosen, weights

    return hook


def _hidden_of_model(model: TransformersModel, sequences: list[Tensor]) -> Tensor:
    """Returns the hidden states of all sequences from one pass."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, CHECK_LENGTHS, *model.attention_options(layer))

    positions = torch.cat([torch.arange(len(sequence), device=sequence.device) for sequence in sequences])
    return model(torch.cat(sequences), positions, make_attend(attend))  # type: ignore[no-any-return]


def _hidden_of_class(model: TransformersModel, sequence: Tensor) -> Tensor:
    """Returns the hidden states that the class passes to its head, with its own eager attention."""
    built: Any = model.class_model[0]
    captured: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda module, args: captured.append(args[0][0]))
    try:
        built.set_attn_implementation("eager")
        built(input_ids=sequence[None], use_cache=False)
    finally:
        hook.remove()
        built.set_attn_implementation(SERVING_ATTENTION)
    return captured[0].float()


def main() -> None:
    """Reads the arguments of `describe` as JSON from stdin and writes the configuration or the error to stdout.

    config/decoder.py starts this process. The output omits fields that have their default value.
    """
    with contextlib.redirect_stdout(sys.stderr):  # transformers prints messages
        try:
            config = describe(*json.load(sys.stdin))
        except ModelError as error:
            output: dict[str, Any] = {"refused": str(error)}
        else:
            values = asdict(config)
            changed = [f.name for f in fields(config) if getattr(config, f.name) != f.default]
            output = {"fields": {name: values[name] for name in changed}}
    json.dump(output, sys.stdout)


if __name__ == "__main__":
    main()
