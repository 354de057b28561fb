"""transformers' class for a config.json, with the interface of our decoder (network/decoder.py).

It is built without weights: parameters are on "meta", buffers are as the class computes them. Modules and parameters
have their names in the class, and so in files. Its linear layers may be replaced by ours, in place.

A class calls the attention function that is registered under the name in its configuration. Ours passes each call, with
its number, on to the function that `answering` has set for this thread of execution: in every pass the layers come in
the same order. So attention returns to the caller of the pass, layer by layer, with queries and keys that are already
rotated: the rotation that is passed along with them does nothing.
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
from fp8serve.fp8.stacked import Stacked
from fp8serve.model.config.model_config import ModelConfig, TransformersClass
from fp8serve.model.config.reader import MOST
from fp8serve.model.network.experts import mixtures
from fp8serve.model.network.rotary import Attend
from fp8serve.model.transformers_backend.experts import check_mixture, in_mixtures, take_apart

OWN_ATTENTION = (
    "{} cannot be served: transformers' class computes its attention or its positions in a way of its own, and "
    "fp8serve replaces the attention of classes that leave it to transformers' attention interface."
)
SERVED = "fp8serve"  # no mask is made for it
TRIED = "fp8serve_trial"  # the mask is a `Mask`
# answer(number of the call, module, query, key, value, mask, options), [1, heads, T, head_dim] -> [T, heads, head_dim]
Answer = Callable[[int, nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
Seen = Callable[[Tensor, Tensor], Tensor]  # (query positions, key positions) -> bool
_pass: ContextVar[tuple[Iterator[int], Answer]] = ContextVar("pass")
LAYER_COUNTS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"})
"""The keys by which config.json gives the number of layers, as transformers' classes spell it."""


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Inside, `answer` is called for every attention layer of a pass through a class."""
    token = _pass.set((count(), answer))
    try:
        yield
    finally:
        _pass.reset(token)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, heads, T, head_dim] -> [1, T, heads, head_dim], and no weights."""
    numbers, answer = _pass.get()
    return answer(next(numbers), module, query, key, value, attention_mask, options)[None], None


class Mask(Tensor):
    """What a class's mask code passes to attention: `sees`, the mask as a function of two positions."""

    sees: Seen


def mask(*args: Any, mask_function: Callable[..., Tensor], **options: Any) -> Tensor:
    """As transformers calls it to make the mask of some layers."""
    result = torch.zeros(1, 1, 1, 1).as_subclass(Mask)
    result.sees = lambda q, k: mask_function(torch.zeros_like(q), torch.zeros_like(q), q, k)
    return result


@cache
def register() -> None:
    """Tell transformers both names, before a class is built with one of them."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SERVED, attention)
    AttentionInterface.register(TRIED, attention)
    AttentionMaskInterface.register(TRIED, mask)


def build(config_json: str, attention: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The causal language model of this config.json, in evaluation mode. ModelError: it cannot be served."""
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
    except Exception as problem:  # transformers' classes may raise anything
        if isinstance(problem, KeyError) and attention in problem.args:  # it looks up a class of its own
            raise ModelError(OWN_ATTENTION.format(_name(raw))) from problem
        raise ModelError(
            f"transformers {__version__} does not build {_name(raw)} from this config.json: {quote(problem)}."
        ) from problem
    check_mixture(model, raw["model_type"], _name(raw))
    take_apart(model, dtype)
    check(model, _name(raw))
    return cast(nn.Module, model.eval())


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Without the warnings of torchao and torch about parts of torchao, which transformers imports and nobody uses."""
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
    """ModelError for more layers than any model has, before transformers makes a list or a module for each."""
    most = MOST["num_hidden_layers"]
    for section in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key in LAYER_COUNTS & section.keys():
            if isinstance(count := section[key], int | float) and count > most:
                raise ModelError(f"config.json: {key} is {shown(count)} where at most {most} was expected.")


def check(model: Any, name: str) -> None:
    """ModelError for a class in which tokens interact outside attention, or which has other matrix products."""
    from transformers.pytorch_utils import Conv1D

    matrices = (nn.Linear, nn.Embedding, Conv1D)
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model, which is not supported.")
    routers = in_mixtures(model)
    for path, module in model.named_modules():
        if any(path == router or path.startswith(f"{router}.") for router in routers):
            continue  # which keep their weights in high precision
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 2 or (parameter.dim() == 2 and not isinstance(module, matrices)):
                raise ModelError(
                    f"{name} has the weight {path}.{leaf} {list(parameter.shape)} in a {type(module).__name__}; by "
                    "transformers' class a model is served if its weights are those of linear layers and embeddings."
                )


def quote(problem: Exception) -> str:
    """Another library's message, as a quotation at the end of a sentence."""
    return f"{one_line(problem)!r}" if str(problem).strip() else type(problem).__name__


def _name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else shown(raw.get("model_type"))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, a module's parameters lose their memory as they are registered; buffers keep their values."""
    modules: Any = nn.Module
    register = modules.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a parameter that is there already is tied
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    modules.register_parameter = on_meta
    try:
        yield
    finally:
        modules.register_parameter = register


class TransformersModel(nn.Module):
    """`model(token_ids, positions, attend)`, then `model.logits(hidden)`; see `Decoder`.

    Parameters are on "meta", to be replaced by a checkpoint's; buffers have the values that the class gives them.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self._class = cast(TransformersClass, config.computed_by)
        built: Any = build(self._class.config_json, SERVED, dtype)
        self.transposed = replace_conv1d(built)  # whose weights are transposed in files
        for name, child in built.named_children():
            self.add_module(name, child)
        self.whole = (built,)  # in a tuple, because its modules are already registered
        self._base = str(built.base_model_prefix)
        self.head_name = _name_of(built, built.get_output_embeddings())
        self._embedding_name = _name_of(built, built.get_input_embeddings())
        high_precision = {self.head_name, *in_mixtures(built)}  # a router stays in high precision
        self._linears = [n for n, m in built.named_modules() if isinstance(m, nn.Linear) and n not in high_precision]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None) -> Tensor:
        """See Decoder.forward. All rows are computed, and those of `last` are returned."""

        def answer(layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Any) -> Tensor:
            heads = cast(tuple[Tensor, Tensor, Tensor], tuple(t[0].transpose(0, 1).contiguous() for t in (q, k, v)))
            still = q.new_ones(len(token_ids), 1, q.shape[3]), q.new_zeros(len(token_ids), 1, q.shape[3])
            return attend(layer, heads, still, None)

        base: Any = self._modules[self._base]
        with answering(answer):
            hidden: Tensor = base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)[0][0]
        return hidden if last is None else hidden[last]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> FP32 [T, vocab]."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """The same in the weights' dtype."""
        return self.head(hidden)  # type: ignore[no-any-return]

    def attention_options(self, layer: int) -> tuple[float, int | None, float | None, Tensor | None]:
        """See Decoder.attention_options."""
        config = self.config
        return self._class.softmax_scales[layer], config.layer_windows[layer], config.attention_softcap, None

    @property
    def parts(self) -> Sequence[nn.Module]:
        """See Decoder.parts: the whole model is one part."""
        return [self]

    def enter(self, token_ids: Tensor) -> Tensor:
        """See Decoder.enter."""
        return token_ids

    def places(self, positions: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """See Decoder.places."""
        return [positions]

    def leave(self, x: Tensor) -> Tensor:
        """See Decoder.leave."""
        return x

    def named_in(self, part: int, names: Iterable[str]) -> list[str]:
        """See Decoder.named_in."""
        return list(names)

    @property
    def head(self) -> nn.Module:
        """The linear layer that makes logits."""
        return self.get_submodule(self.head_name)

    @property
    def embedding(self) -> nn.Embedding:
        """The embedding of tokens."""
        return cast(nn.Embedding, self.get_submodule(self._embedding_name))

    def linear_names(self) -> list[str]:
        """See Decoder.linear_names."""
        return self._linears

    def pruned_names(self) -> list[str]:
        """See Decoder.pruned_names: here every layer sees all rows."""
        return []

    def tie(self) -> None:
        """See Decoder.tie."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def expect(self, longest: int) -> None:
        """See Decoder.expect: no class is served whose angles depend on it."""

    def join(self) -> None:
        """See Decoder.join: the class calls its layers one by one, but experts are stacked."""
        for experts in mixtures(self).values():
            experts.join()

    def matrices(self) -> Iterator[nn.Module | Stacked]:
        """See Decoder.matrices."""
        stacked = {name: experts for name, experts in mixtures(self).items() if experts.is_stacked}
        for experts in stacked.values():
            yield from experts.matrices()
        alone = [n for n in self._linears if not any(n.startswith(f"{block}.experts.") for block in stacked)]
        yield from (self.get_submodule(name) for name in (*alone, self.head_name))


def replace_conv1d(model: nn.Module) -> frozenset[str]:
    """Replace every Conv1D of `model` by a linear layer without weights; returns their names."""
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in modules.items():
        owner, _, leaf = name.rpartition(".")
        rows, columns, dtype = cast(int, module.nf), cast(int, module.nx), module.weight.dtype
        setattr(model.get_submodule(owner), leaf, nn.Linear(columns, rows, device="meta", dtype=dtype))
    return frozenset(modules)


def _name_of(model: nn.Module, target: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is target)
