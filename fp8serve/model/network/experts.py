"""A mixture of experts: a router sends every token through a few of many small MLPs and adds up their outputs.

The router is never quantized: its logits are computed in the type of the activations, its softmax and the weights of
the chosen experts in FP32. The outputs of a token's experts are added in the order of the experts, so that the sum does
not depend on other tokens' choices, and every sum is rounded, as in transformers.

Tokens are sorted by expert, so that the rows of each expert are adjacent. The kind of the experts' linears decides how
they are computed: frozen ones, for serving, are stacked (fp8/stacked.py), those in training run grouped
(fp8/grouped_linear.py), and all others, such as BF16 ones and those with calibration's hooks, are called one expert
after the other. All give the same bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops as ops  # registers the op called below
from fp8serve.fp8.batch_invariant_product import product
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.grouped_linear import Span, grouped_linear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops.grouped import spans
from fp8serve.fp8.ops.mixture import Scores, add_weighted, weigh
from fp8serve.fp8.stacked import Stacked, can_stack
from fp8serve.model.config.mixture import CORRECTION, Routing
from fp8serve.model.config.mixture import Experts as ExpertSettings
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.network.fusing import GATED, Ending, direct
from fp8serve.model.storage.memory import free_memory, trim
from fp8serve.model.storage.shards import release_pages

_add_weighted = torch.ops.fp8serve.add_weighted.default
_choose_experts = torch.ops.fp8serve.choose_experts.default
_sort_by_expert = torch.ops.fp8serve.sort_by_expert.default
Chosen = tuple[Tensor, Tensor]  # experts int64 [T, k], their weights [T, k]

MEMORY_SHARE = 0.6  # the fraction of free memory that stacked weights may take; larger ones stay mapped


class Router(nn.Linear):
    """A linear that `convert` leaves in high precision."""


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """gpt-oss' activation: gate * sigmoid(alpha * gate) * (up + 1), with gate clamped to `limit` and up to
    +-`limit`."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


class Expert(nn.Module):
    """down(activation(gate(x)) * up(x)), under the names that the file has for the three."""

    def __init__(self, config: ModelConfig, size: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.activation, self.clamp = config.activation, settings.clamp
        self.names = gate, up, down = settings.names.gate, settings.names.up, settings.names.down
        self.register_module(gate, nn.Linear(config.hidden_size, size, bias=settings.bias))
        self.register_module(up, nn.Linear(config.hidden_size, size, bias=settings.bias))
        self.register_module(down, nn.Linear(size, config.hidden_size, bias=settings.bias))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> the same."""
        gate, up, down = self.linears()
        return down(self.gated(gate(x), up(x)))  # type: ignore[no-any-return]

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The input of `down`."""
        return GATED[self.activation](gate, up) if self.clamp is None else clamped_swiglu(gate, up, *self.clamp)

    @property
    def is_silu(self) -> bool:
        """Whether `gated` is silu(gate) * up."""
        return self.activation == "silu" and self.clamp is None

    def linears(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """gate, up and down."""
        gate, up, down = (cast(nn.Module, self._modules[name]) for name in self.names)
        return gate, up, down


def router_names(model: nn.Module) -> list[str]:
    """Names of the layers that choose experts or weigh a shared one, in the model's order; none of them is FP8."""
    return [name for name, module in model.named_modules() if isinstance(module, Router | GroupRouter)]


def _router(config: ModelConfig, settings: ExpertSettings) -> nn.Module:
    if settings.routing is not None:
        return GroupRouter(config.hidden_size, settings.count, settings.routing)
    return Router(config.hidden_size, settings.count, bias=settings.bias)


class Experts(nn.ModuleList):
    """The experts of one mixture.

    tokens int64 [E]: how many each expert was given since `reset_counters`. every_expert: all tokens run through all
    experts, so that all linears can be observed; the result stays that of the chosen experts.
    """

    def __init__(self, experts: Iterable[Expert]) -> None:
        super().__init__(experts)
        self.tokens = torch.zeros(len(self), dtype=torch.int64, device="cpu")
        self.every_expert = False
        self._is_silu = all(expert.is_silu for expert in self._experts())
        self._stacks: tuple[Stacked, Stacked] | None = None  # gate and up, down

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen int64 [T, k], weights [T, k] -> the weighted sum of the chosen experts' outputs."""
        stacks = self._current_stacks(chosen)
        if stacks is not None and self._is_silu and stacks[0].makes_mlp_with(stacks[1], x):
            return stacks[0].mlp(stacks[1], x, chosen, weights, self._counter(chosen.device))
        rows, places, offsets = _sort_by_expert(chosen, self._counter(chosen.device))
        if self.every_expert:
            outputs = self._by_every_expert(x, rows, offsets)
        else:
            outputs = self._by_chosen(x, rows, offsets, stacks)
        if torch.is_grad_enabled() or outputs.dtype is not x.dtype:
            return add_weighted(outputs, places, weights, x.dtype)
        return _add_weighted(outputs, places, weights)  # type: ignore[no-any-return]

    def _by_chosen(self, x: Tensor, tokens: Tensor, offsets: Tensor, stacks: tuple[Stacked, Stacked] | None) -> Tensor:
        """[T * k, hidden]: the outputs of each token's experts, sorted by expert."""
        rows = x.index_select(0, tokens)
        if stacks is not None:
            gate_up = stacks[0](rows, offsets)
            gate, up = gate_up.split_with_sizes([gate_up.shape[1] // 2] * 2, 1)
            return stacks[1](self._gated(gate, up), offsets)
        return self._by_linears(rows, spans(offsets))

    def _by_linears(self, rows: Tensor, where: Sequence[Span]) -> Tensor:
        gates, ups, downs = zip(*(expert.linears() for expert in self._experts()), strict=True)
        if not all(type(linear) is Linear for linear in (*gates, *ups, *downs)):
            parts = [e(rows[begin:end]) for e, (begin, end) in zip(self._experts(), where, strict=True) if begin < end]
            return torch.cat(parts) if parts else rows
        gated = self._gated(grouped_linear(gates, rows, where), grouped_linear(ups, rows, where))
        return grouped_linear(downs, gated, where)

    def _by_every_expert(self, x: Tensor, tokens: Tensor, offsets: Tensor) -> Tensor:
        """The result of `_by_chosen`, after every expert has seen all tokens."""
        parts = [e(x)[tokens[slice(*span)]] for e, span in zip(self._experts(), spans(offsets), strict=True)]
        return torch.cat(parts)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._experts()[0].gated(gate, up)

    def _experts(self) -> Sequence[Expert]:
        return cast(Sequence[Expert], self)

    def _counter(self, device: torch.device) -> Tensor:
        """`tokens`, moved to where they are counted."""
        if self.tokens.device != device:
            with torch.inference_mode(False):
                self.tokens = self.tokens.to(device)
        return self.tokens

    def reset_counters(self) -> None:
        """Start counting tokens anew."""
        self.tokens.zero_()

    def join(self) -> None:
        """For serving: stack the experts' linears in three dimensions where possible and memory allows."""
        experts = list(self._experts())
        gate, up, down = experts[0].names
        groups = (gate, up), (down,)
        linears = [linear for expert in experts for linear in expert.linears()]
        mapped = [linear.weight for linear in linears if isinstance(linear, FrozenLinear)]
        fits = sum(weight.nbytes for weight in mapped) < MEMORY_SHARE * free_memory()
        if not fits or not all(can_stack(experts, names) for names in groups):
            return
        self._stacks = Stacked(experts, groups[0]), Stacked(experts, groups[1])
        for weight in mapped:
            release_pages(weight)
        del mapped
        trim()

    @property
    def is_stacked(self) -> bool:
        return self._stacks is not None

    def matrices(self) -> Iterator[nn.Module | Stacked]:
        """What a step multiplies by: the stacks, or each linear."""
        if self._stacks is not None:
            yield from (stack for stack in self._stacks if stack.is_packable)
        else:
            yield from (linear for expert in self._experts() for linear in expert.linears())

    def _current_stacks(self, chosen: Tensor) -> tuple[Stacked, Stacked] | None:
        """The stacks, if they may compute the chosen experts."""
        stacks = self._stacks
        if stacks is None or self.every_expert or torch.is_grad_enabled():
            return None
        if stacks[0].is_unchanged and stacks[1].is_unchanged:
            return stacks
        used = range(len(self)) if chosen.is_cuda else set(chosen.flatten().tolist())
        return stacks if stacks[0].is_current(used) and stacks[1].is_current(used) else None


class Mixture(nn.Module):
    """Router and experts, in place of a layer's MLP."""

    experts: Experts

    def __init__(self, config: ModelConfig, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings, self._choice = settings, ExpertChoice(settings)
        names = settings.names
        self.register_module(names.router, _router(config, settings))
        self.experts = Experts(Expert(config, settings.size, settings) for _ in range(settings.count))
        if names.shared is not None and settings.shared_size is not None:
            self.register_module(names.shared, Expert(config, settings.shared_size, settings))
        if names.shared_gate is not None:
            self.register_module(names.shared_gate, Router(config.hidden_size, 1, bias=False))

    def forward(self, x: Tensor, norm: nn.Module, ending: Ending) -> Tensor:
        """x [T, hidden] plus ending(mixture of norm(x))."""
        hidden, experts = direct(norm)(x), direct(self._child("experts"))
        return x + ending(self._shared(experts(hidden, *self.choose(hidden)), hidden))

    def choose(self, x: Tensor) -> Chosen:
        """x [T, hidden] -> (experts int64 [T, k], their weights [T, k])."""
        router = self._child(self.settings.names.router)
        return self._choice(direct(router)(x), router)

    def _shared(self, total: Tensor, x: Tensor) -> Tensor:
        names = self.settings.names
        if names.shared is None:
            return total
        output: Tensor = self._child(names.shared)(x)
        if names.shared_gate is not None:
            output = torch.sigmoid(self._child(names.shared_gate)(x)) * output
        return total + output

    def _child(self, name: str) -> nn.Module:
        return cast(nn.Module, self._modules[name])

    def join(self) -> None:
        """For serving: see `Experts.join`."""
        self.experts.join()

    def matrices(self) -> Iterator[nn.Module | Stacked]:
        """What a step multiplies by: the stacks, or each linear."""
        yield from self.experts.matrices()
        if self.settings.names.shared is not None:
            yield from cast(Expert, self._child(self.settings.names.shared)).linears()


def mixtures(model: nn.Module) -> dict[str, Experts]:
    """The experts of every mixture in `model`, by the name of the mixture."""
    result = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    return {name.rpartition(".")[0]: experts for name, experts in result.items()}


@contextmanager
def every_expert(model: nn.Module) -> Iterator[None]:
    """Inside, every token runs through every expert, see `Mixture`."""
    experts = mixtures(model).values()
    try:
        for mixture in experts:
            mixture.every_expert = True
        yield
    finally:
        for mixture in experts:
            mixture.every_expert = False


def reset_token_counts(model: nn.Module) -> None:
    """Start counting anew in every mixture of `model`."""
    for mixture in mixtures(model).values():
        mixture.reset_counters()


def rows_of_experts(model: nn.Module) -> dict[str, int]:
    """The number of rows that every expert's linear has seen, by its name in `model`."""
    result: dict[str, int] = {}
    for name, mixture in mixtures(model).items():
        for index, (expert, rows) in enumerate(zip(mixture, mixture.tokens.tolist(), strict=True)):
            result |= {f"{name}.experts.{index}.{leaf}": rows for leaf in cast(Expert, expert).names}
    return result


class GroupRouter(nn.Module):
    """x [T, hidden] -> logits FP32 [T, experts]: DeepSeek's.

    V3's has a correction that balances the experts' load. It is added to the scores for the choice only, and no
    gradient trains it.
    """

    weight: nn.Parameter

    def __init__(self, inputs: int, experts: int, routing: Routing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inputs))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear
        correction = nn.Parameter(torch.zeros(experts), requires_grad=False) if routing.sigmoid else None
        self.register_parameter(CORRECTION, correction)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, None, torch.float32)


class ExpertChoice:
    """The way of one family."""

    def __init__(self, settings: ExpertSettings) -> None:
        routing = settings.routing or Routing(scale=1.0, groups=1, chosen_groups=1, sigmoid=False)
        self._scores = Scores.SIGMOID if routing.sigmoid else Scores.SOFTMAX
        if settings.weighs_chosen:
            self._scores = Scores.SOFTMAX_OF_CHOSEN
        self._groups = settings.per_token, int(self._scores), routing.groups, routing.chosen_groups
        self._weights = settings.normalizes, routing.scale
        self._dtype = torch.float32 if settings.wide_weights else None
        self._closeness = settings.closeness

    def __call__(self, logits: Tensor, router: nn.Module) -> Chosen:
        """logits [T, experts] of `router`."""
        if self._closeness is not None:
            return sparsely_mixed(logits, self._closeness)
        correction = router._parameters.get(CORRECTION)
        if correction is not None:
            correction = correction.float()  # type: ignore[assignment]  # in case someone moved all to another type
        rule = *self._groups, *self._weights, self._dtype or logits.dtype
        if logits.requires_grad and torch.is_grad_enabled():
            return cast(Chosen, _Chosen.apply(logits, correction, *rule))  # type: ignore[no-untyped-call]
        return cast(Chosen, _choose_experts(logits, correction, *rule))


class _Chosen(torch.autograd.Function):
    """The op, with the gradient of `weigh`, which computes the same weights of the experts that were chosen."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, correction: Tensor | None, count: int, scores: int, *rest: Any) -> Chosen:
        chosen, weights = _choose_experts(logits, correction, count, scores, *rest)
        ctx.save_for_backward(logits, chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.weigh = partial(weigh, scores=scores, normalizes=rest[2], scale=rest[3], dtype=rest[4])
        return chosen, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            weights = ctx.weigh(logits, chosen)
        return *torch.autograd.grad(weights, logits, grad), *[None] * 8


def sparsely_mixed(logits: Tensor, closeness: float) -> Chosen:
    """logits [T, experts] -> (the chosen int64 [T, 2], weights [T, 2] in the logits' type): sparsemixer's.

    The best expert, then the best of the others; each weight comes from a softmax over the experts that are about as
    good.
    """
    weight, best = _among_close(logits, logits, closeness)
    other_weight, other = _among_close(logits.scatter(-1, best, -torch.inf), logits, closeness)
    return torch.cat((best, other), -1), torch.cat((weight, other_weight), -1)


def _among_close(left: Tensor, logits: Tensor, closeness: float) -> tuple[Tensor, Tensor]:
    """(weight, index) [T, 1] of the largest of `left`: `logits` with -inf where an expert is chosen already."""
    with torch.no_grad():
        largest, index = left.max(-1, keepdim=True)
        is_far = (largest - logits) / logits.abs().clamp(min=largest) > closeness
    return left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, index), index
