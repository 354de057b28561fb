"""Builds transformers' model class of a config.json and gives it the interface of our decoder (network/decoder.py).

The class is built without weights: parameters are on the "meta" device, and buffers have the values that the class
computes. Modules and parameters have the names of the class. Linear layers may be replaced by FP8 layers in place.

The class calls the attention function that is registered under the name in its configuration. Our function forwards
each call, with its index in the forward pass, to the handler that `handle_attention` sets. The layers of a class always
run in the same order, so the index is the layer's. Queries and keys already have rotary embeddings; a handler that
rotates them gets cosines of one and sines of zero.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8serve.errors import ModelError, one_line, shown
from fp8serve.fp8.stacked import StackedExperts
from fp8serve.model.config.model_config import ModelConfig, TransformersClass
from fp8serve.model.config.reader import MAX_SIZES
from fp8serve.model.network.experts import mixtures
from fp8serve.model.network.rotary import Attend
from fp8serve.model.transformers_backend.experts import check_mixture, router_modules, unstack_experts

OWN_ATTENTION = (
    "{} cannot be served: transformers' class computes its attention or its positions in a way of its own, and "
    "fp8serve replaces the attention of classes that leave it to transformers' attention interface."
)
SERVING_ATTENTION = "fp8serve"  # name of the attention function that gets no mask
TRACING_ATTENTION = "fp8serve_trace"  # name of the attention function that gets a `Mask`
# handler(layer, module, query, key, value, mask, options), [1, heads, T, head_dim] -> [T, heads, head_dim]
AttentionHandler = Callable[[int, nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
MaskFunction = Callable[[Tensor, Tensor], Tensor]  # (query positions, key positions) -> whether the key is visible
_handler: ContextVar[tuple[Iterator[int], AttentionHandler]] = ContextVar("handler")
LAYER_COUNTS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"})
"""The keys of config.json that give the number of layers in transformers' classes."""


@contextmanager
def handle_attention(handler: AttentionHandler) -> Iterator[None]:
    """Inside the block, which runs one forward pass, `handler` computes the attention of every layer."""
    token = _handler.set((count(), handler))
    try:
        yield
    finally:
        _handler.reset(token)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, heads, T, head_dim] -> [1, T, heads, head_dim], without weights."""
    layers, handler = _handler.get()
    return handler(next(layers), module, query, key, value, attention_mask, options)[None], None


class Mask(Tensor):
    """A placeholder for an attention mask; `is_visible` is the mask as a function of two positions."""

    is_visible: MaskFunction


def mask(*args: Any, mask_function: Callable[..., Tensor], **options: Any) -> Tensor:
    """transformers' mask function: returns a `Mask` with the function from which transformers would compute a mask."""
    result = torch.zeros(1, 1, 1, 1).as_subclass(Mask)
    result.is_visible = lambda q, k: mask_function(torch.zeros_like(q), torch.zeros_like(q), q, k)
    return result


@cache
def register() -> None:
    """Registers our attention and mask functions with transformers, before a class is built with their names."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SERVING_ATTENTION, attention)
    AttentionInterface.register(TRACING_ATTENTION, attention)
    AttentionMaskInterface.register(TRACING_ATTENTION, mask)


def build(config_json: str, attention: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Builds the causal language model of a config.json, in evaluation mode. Raises ModelError if it is unsupported."""
    with _quiet_imports():
        from transformers import (
            CONFIG_MAPPING,
            MODEL_FOR_CAUSAL_LM_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            __version__,
        )

        register()
    raw = json.loads(config_json)
    if raw.get("model_type") not in CONFIG_MAPPING:
        remote = "; code that comes with a model is never run" if "auto_map" in raw else ""
        raise ModelError(
            f"config.json has the model_type {shown(raw.get('model_type'))}, which neither fp8serve nor the installed "
            f"transformers {__version__} knows{remote}."
        )
    if CONFIG_MAPPING[raw["model_type"]] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"The installed transformers {__version__} has no causal language model of the model_type "
            f"{shown(raw['model_type'])}."
        )
    _check_layers(raw)
    from_config: Any = AutoModelForCausalLM.from_config
    try:
        config = AutoConfig.for_model(**{key: value for key, value in raw.items() if key != "quantization_config"})
        with _parameters_on_meta():
            model = from_config(config, attn_implementation=attention, dtype=dtype)
    except Exception as error:  # transformers' classes may raise anything
        if isinstance(error, KeyError) and attention in error.args:  # the class has its own table of attention classes
            raise ModelError(OWN_ATTENTION.format(_architecture(raw))) from error
        raise ModelError(
            f"transformers {__version__} does not build {_architecture(raw)} from this config.json: {quote(error)}."
        ) from error
    check_mixture(model, raw["model_type"], _architecture(raw))
    unstack_experts(model, dtype)
    check_modules(model, _architecture(raw))
    return cast(nn.Module, model.eval())


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Silences warnings about torchao inside the block; transformers imports it, and fp8serve does not use it."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check_layers(raw: Mapping[str, Any]) -> None:
    """Raises ModelError if the number of layers is absurd, before transformers allocates something for each layer."""
    max_layers = MAX_SIZES["num_hidden_layers"]
    for section in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key in LAYER_COUNTS & section.keys():
            if isinstance(count := section[key], int | float) and count > max_layers:
                raise ModelError(f"config.json: {key} is {shown(count)} where at most {max_layers} was expected.")


def check_modules(model: Any, name: str) -> None:
    """Raises ModelError if a weight matrix belongs to another module than a linear layer, an embedding or a router."""
    from transformers.pytorch_utils import Conv1D

    matrices = (nn.Linear, nn.Embedding, Conv1D)
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model, which is not supported.")
    routers = router_modules(model)
    for path, module in model.named_modules():
        if any(path == router or path.startswith(f"{router}.") for router in routers):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 2 or (parameter.dim() == 2 and not isinstance(module, matrices)):
                raise ModelError(
                    f"{name} has the weight {path}.{leaf} {list(parameter.shape)} in a {type(module).__name__}; the "
                    "transformers backend only supports weights of linear layers and embeddings."
                )


def quote(error: Exception) -> str:
    """Returns the message of an error, quoted for the end of a sentence, or the name of its class."""
    return f"{one_line(error)!r}" if str(error).strip() else type(error).__name__


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else shown(raw.get("model_type"))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside the block, parameters move to "meta" when a module registers them; buffers keep their values."""
    modules: Any = nn.Module
    register = modules.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a parameter on "meta" is tied to another module's
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    modules.register_parameter = on_meta
    try:
        yield
    finally:
        modules.register_parameter = register


def class_linear_names(built: Any) -> list[str]:
    """Returns the names of the linear layers of transformers' model, without the head and routers."""
    high_precision = {_module_name(built, built.get_output_embeddings()), *router_modules(built)}
    return [n for n, m in built.named_modules() if isinstance(m, nn.Linear) and n not in high_precision]


class TransformersModel(nn.Module):
    """A model of transformers with the interface of `Decoder`; its parameters are on "meta" until they are loaded.

    `Decoder` describes the methods. The whole model is one part.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self._class = cast(TransformersClass, config.computed_by)
        built: Any = build(self._class.config_json, SERVING_ATTENTION, dtype)
        self.transposed = replace_conv1d(built)  # names of layers whose weights are transposed in files
        for name, child in built.named_children():
            self.add_module(name, child)
        self.class_model = (built,)  # a tuple, because its modules are already registered here
        self._base = str(built.base_model_prefix)
        self.head_name = _module_name(built, built.get_output_embeddings())
        self._embedding_name = _module_name(built, built.get_input_embeddings())
        self._linears = class_linear_names(built)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, output_rows: Tensor | None = None
    ) -> Tensor:
        """Computes all rows and returns `output_rows` of them."""

        def handler(layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Any) -> Tensor:
            heads = cast(tuple[Tensor, Tensor, Tensor], tuple(t[0].transpose(0, 1).contiguous() for t in (q, k, v)))
            no_rotation = q.new_ones(len(token_ids), 1, q.shape[3]), q.new_zeros(len(token_ids), 1, q.shape[3])
            return attend(layer, heads, no_rotation, None)

        base: Any = self._modules[self._base]
        with handle_attention(handler):
            hidden: Tensor = base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)[0][0]
        return hidden if output_rows is None else hidden[output_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.logits_in_weight_dtype(hidden).float()

    def logits_in_weight_dtype(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # type: ignore[no-any-return]

    def attention_options(self, layer: int) -> tuple[float, int | None, float | None, Tensor | None]:
        config = self.config
        return self._class.softmax_scales[layer], config.layer_windows[layer], config.attention_softcap, None

    @property
    def parts(self) -> Sequence[nn.Module]:
        return [self]

    def embed(self, token_ids: Tensor) -> Tensor:
        return token_ids

    def position_embeddings(self, positions: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        return [positions]

    def apply_final_norm(self, x: Tensor) -> Tensor:
        return x

    def names_in_part(self, part: int, names: Iterable[str]) -> list[str]:
        return list(names)

    @property
    def head(self) -> nn.Module:
        return self.get_submodule(self.head_name)

    @property
    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.get_submodule(self._embedding_name))

    def linear_names(self) -> list[str]:
        return self._linears

    def pruned_names(self) -> list[str]:
        return []  # every layer computes all rows

    def tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def set_max_length(self, length: int) -> None:
        """Does nothing: `class_trace` refuses classes whose rotary embeddings depend on the length."""

    def join(self) -> None:
        """Stacks only experts, because the class calls all other layers one by one."""
        for experts in mixtures(self).values():
            experts.join()

    def matrices(self) -> Iterator[nn.Module | StackedExperts]:
        stacked = {name: experts for name, experts in mixtures(self).items() if experts.stacks()}
        for experts in stacked.values():
            yield from experts.matrices()
        unstacked = [n for n in self._linears if not any(n.startswith(f"{block}.experts.") for block in stacked)]
        yield from (self.get_submodule(name) for name in (*unstacked, self.head_name))


def replace_conv1d(model: nn.Module) -> frozenset[str]:
    """Replaces every Conv1D of `model` by a linear layer without weights and returns the layers' names."""
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in modules.items():
        owner, _, leaf = name.rpartition(".")
        rows, columns, dtype = cast(int, module.nf), cast(int, module.nx), module.weight.dtype
        setattr(model.get_submodule(owner), leaf, nn.Linear(columns, rows, device="meta", dtype=dtype))
    return frozenset(modules)


def _module_name(model: nn.Module, target: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is target)
