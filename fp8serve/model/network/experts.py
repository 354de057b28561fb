"""A mixture of experts: a router chooses a few of many small MLPs for each token and adds their weighted outputs.

The router is never quantized. Its logits are computed in the activations' dtype, its softmax and the weights of the
chosen experts in FP32. The outputs of a token's experts are added in the order of the experts, so the sum does not
depend on other tokens' choices. As in transformers, every partial sum is rounded.

Tokens are sorted by expert, so that the rows of each expert are adjacent. Serving stacks the experts' frozen linears
(fp8/stacked.py), and training runs them as grouped linears (fp8/grouped_linear.py). All other experts, such as those in
BF16 and those with calibration's hooks, are called one by one. The results have the same bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops as ops  # registers the ops that are called below
from fp8serve.fp8.batch_invariant import product
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.grouped_linear import Span, grouped_linear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops.grouped import expert_row_ranges
from fp8serve.fp8.ops.mixture import Scores, add_weighted, routing_weights
from fp8serve.fp8.stacked import StackedExperts, can_stack
from fp8serve.model.config.mixture import CORRECTION, Routing
from fp8serve.model.config.mixture import Experts as ExpertSettings
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.network.fusion import GATED_ACTIVATIONS, OutputTransform, forward_of
from fp8serve.model.storage.mapping import release_pages
from fp8serve.model.storage.memory import free_memory, trim

_add_weighted = torch.ops.fp8serve.add_weighted.default
_choose_experts = torch.ops.fp8serve.choose_experts.default
_sort_by_expert = torch.ops.fp8serve.sort_by_expert.default
ExpertChoice = tuple[Tensor, Tensor]  # experts int64 [T, k], and their weights [T, k]

# The fraction of free memory that stacked weights may use. Larger weights stay memory-mapped, one tensor per expert.
MAX_STACKED_MEMORY_FRACTION = 0.6


class Router(nn.Linear):
    """A linear layer that `convert` leaves in high precision."""


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Returns gate * sigmoid(alpha * gate) * (up + 1), after gate was clamped to <= `limit` and up to +-`limit`."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


class Expert(nn.Module):
    """The MLP down(activation(gate(x)) * up(x)). Its linears have their names in the checkpoint."""

    def __init__(self, config: ModelConfig, size: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.activation, self.clamp = config.activation, settings.clamp
        self.names = gate, up, down = settings.names.gate, settings.names.up, settings.names.down
        self.register_module(gate, nn.Linear(config.hidden_size, size, bias=settings.bias))
        self.register_module(up, nn.Linear(config.hidden_size, size, bias=settings.bias))
        self.register_module(down, nn.Linear(size, config.hidden_size, bias=settings.bias))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.linears()
        return down(self.apply_gate(gate(x), up(x)))  # type: ignore[no-any-return]

    def apply_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns activation(gate) * up, the input of `down`."""
        if self.clamp is not None:
            return clamped_swiglu(gate, up, *self.clamp)
        return GATED_ACTIVATIONS[self.activation](gate, up)

    @property
    def is_silu(self) -> bool:
        """Whether `apply_gate` is silu(gate) * up."""
        return self.activation == "silu" and self.clamp is None

    def linears(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        gate, up, down = (cast(nn.Module, self._modules[name]) for name in self.names)
        return gate, up, down


def router_names(model: nn.Module) -> list[str]:
    """Returns the names of the routers and of the gates of shared experts, which never run in FP8."""
    return [name for name, module in model.named_modules() if isinstance(module, Router | GroupRouter)]


class Experts(nn.ModuleList):
    """The experts of one mixture.

    `tokens`, int64 [E], counts the tokens of each expert since the last `reset_token_counts`. If `route_to_all_experts`
    is set, every token also runs through the other experts, so that calibration observes all linears; the outputs do
    not change.
    """

    def __init__(self, experts: Iterable[Expert]) -> None:
        super().__init__(experts)
        self.tokens = torch.zeros(len(self), dtype=torch.int64, device="cpu")
        self.route_to_all_experts = False
        self._is_silu = all(expert.is_silu for expert in self._experts())
        self._stacks: tuple[StackedExperts, StackedExperts] | None = None  # of gate and up, and of down

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of the `chosen` experts' outputs times `weights` [T, k] for x [T, hidden]."""
        stacks = self._current_stacks(chosen)
        if stacks is not None and self._is_silu and stacks[0].can_run_mlp_with(stacks[1], x):
            return stacks[0].mlp(stacks[1], x, chosen, weights, self._counter(chosen.device))
        tokens, rows, offsets = _sort_by_expert(chosen, self._counter(chosen.device))
        if self.route_to_all_experts:
            outputs = self._run_all(x, tokens, offsets)
        else:
            outputs = self._run_chosen(x, tokens, offsets, stacks)
        if torch.is_grad_enabled() or outputs.dtype is not x.dtype:
            return add_weighted(outputs, rows, weights, x.dtype)
        return _add_weighted(outputs, rows, weights)  # type: ignore[no-any-return]

    def _run_chosen(
        self, x: Tensor, tokens: Tensor, offsets: Tensor, stacks: tuple[StackedExperts, StackedExperts] | None
    ) -> Tensor:
        """Returns the outputs of each token's experts, [T * k, hidden], sorted by expert."""
        rows = x.index_select(0, tokens)
        if stacks is not None:
            gate_up = stacks[0](rows, offsets)
            gate, up = gate_up.split_with_sizes([gate_up.shape[1] // 2] * 2, 1)
            return stacks[1](self._apply_gate(gate, up), offsets)
        return self._run_linears(rows, expert_row_ranges(offsets))

    def _run_linears(self, rows: Tensor, expert_spans: Sequence[Span]) -> Tensor:
        gates, ups, downs = zip(*(expert.linears() for expert in self._experts()), strict=True)
        if not all(type(linear) is Linear for linear in (*gates, *ups, *downs)):
            pairs = zip(self._experts(), expert_spans, strict=True)
            parts = [expert(rows[begin:end]) for expert, (begin, end) in pairs if begin < end]
            return torch.cat(parts) if parts else rows
        gate, up = grouped_linear(gates, rows, expert_spans), grouped_linear(ups, rows, expert_spans)
        return grouped_linear(downs, self._apply_gate(gate, up), expert_spans)

    def _run_all(self, x: Tensor, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Same as `_run_chosen`, but runs every expert on all tokens."""
        pairs = zip(self._experts(), expert_row_ranges(offsets), strict=True)
        return torch.cat([expert(x)[tokens[begin:end]] for expert, (begin, end) in pairs])

    def _apply_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._experts()[0].apply_gate(gate, up)

    def _experts(self) -> Sequence[Expert]:
        return cast(Sequence[Expert], self)

    def _counter(self, device: torch.device) -> Tensor:
        if self.tokens.device != device:
            with torch.inference_mode(False):
                self.tokens = self.tokens.to(device)
        return self.tokens

    def join(self) -> None:
        """Prepares for serving: stacks the experts' linears if they allow it and if enough memory is free."""
        experts = list(self._experts())
        gate, up, down = experts[0].names
        groups = (gate, up), (down,)
        linears = [linear for expert in experts for linear in expert.linears()]
        weights = [linear.weight for linear in linears if isinstance(linear, FrozenLinear)]
        fits = self._fits_in_memory(sum(weight.nbytes for weight in weights))
        if not fits or not all(can_stack(experts, names) for names in groups):
            return
        self._stacks = StackedExperts(experts, groups[0]), StackedExperts(experts, groups[1])
        for weight in weights:
            release_pages(weight)
        del weights
        trim()

    def _fits_in_memory(self, nbytes: int) -> bool:
        return nbytes < MAX_STACKED_MEMORY_FRACTION * free_memory()

    def stacks(self) -> Sequence[StackedExperts]:
        """Returns the stacks of the experts' linears, or nothing if they are not stacked."""
        return self._stacks or ()

    def matrices(self) -> Iterator[nn.Module | StackedExperts]:
        """Yields the modules whose weights a forward pass multiplies by: the stacks, or each linear."""
        if self._stacks is not None:
            yield from (stack for stack in self._stacks if stack.is_packable)
        else:
            yield from (linear for expert in self._experts() for linear in expert.linears())

    def _current_stacks(self, chosen: Tensor) -> tuple[StackedExperts, StackedExperts] | None:
        """Returns the stacks if they contain the current weights of the chosen experts, otherwise None."""
        stacks = self._stacks
        if stacks is None or self.route_to_all_experts or torch.is_grad_enabled():
            return None
        if stacks[0].is_unchanged and stacks[1].is_unchanged:
            return stacks
        experts = range(len(self)) if chosen.is_cuda else set(chosen.flatten().tolist())
        return stacks if stacks[0].is_current(experts) and stacks[1].is_current(experts) else None


class Mixture(nn.Module):
    """The router and the experts of a layer, which replace its MLP."""

    experts: Experts

    def __init__(self, config: ModelConfig, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings, names = settings, settings.names
        if settings.routing is None:
            router: nn.Module = Router(config.hidden_size, settings.count, bias=settings.bias)
        else:
            router = GroupRouter(config.hidden_size, settings.count, settings.routing)
        self.register_module(names.router, router)
        routing = settings.routing or Routing(scale=1.0, groups=1, chosen_groups=1, sigmoid=False)
        scores = Scores.SIGMOID if routing.sigmoid else Scores.SOFTMAX
        scores = Scores.SOFTMAX_OF_CHOSEN if settings.softmax_over_chosen else scores
        options = settings.per_token, int(scores), routing.groups, routing.chosen_groups
        self._routing_options = *options, settings.normalizes, routing.scale
        self.experts = Experts(Expert(config, settings.size, settings) for _ in range(settings.count))
        if names.shared is not None and settings.shared_size is not None:
            self.register_module(names.shared, Expert(config, settings.shared_size, settings))
        if names.shared_gate is not None:
            self.register_module(names.shared_gate, Router(config.hidden_size, 1, bias=False))

    def forward(self, x: Tensor, norm: nn.Module, transform: OutputTransform) -> Tensor:
        """Returns x + transform(mixture(norm(x))), [T, hidden]."""
        return x + transform(self.mix(forward_of(norm)(x)))

    def mix(self, hidden: Tensor) -> Tensor:
        """Returns the sum of the outputs of the chosen experts and the shared expert, [T, hidden]."""
        experts, names = forward_of(self._child("experts")), self.settings.names
        total: Tensor = experts(hidden, *self.choose(hidden))
        if names.shared is not None:
            output: Tensor = self._child(names.shared)(hidden)
            if names.shared_gate is not None:
                output = torch.sigmoid(self._child(names.shared_gate)(hidden)) * output
            total = total + output
        return total

    def choose(self, x: Tensor) -> ExpertChoice:
        """Returns the experts of each row of x [T, hidden], int64 [T, k], and their weights [T, k]."""
        router = self._child(self.settings.names.router)
        logits: Tensor = forward_of(router)(x)
        if self.settings.sparsemixer_threshold is not None:
            return sparsemixer(logits, self.settings.sparsemixer_threshold)
        correction = router._parameters.get(CORRECTION)
        if correction is not None:
            correction = correction.float()  # type: ignore[assignment]  # `model.to(dtype)` may have changed its type
        options = *self._routing_options, torch.float32 if self.settings.fp32_routing_weights else logits.dtype
        if logits.requires_grad and torch.is_grad_enabled():
            return cast(ExpertChoice, _ChooseExperts.apply(logits, correction, *options))  # type: ignore[no-untyped-call]
        return cast(ExpertChoice, _choose_experts(logits, correction, *options))

    def _child(self, name: str) -> nn.Module:
        return cast(nn.Module, self._modules[name])

    def join(self) -> None:
        """Prepares for serving; see `Experts.join`."""
        self.experts.join()

    def matrices(self) -> Iterator[nn.Module | StackedExperts]:
        yield from self.experts.matrices()
        if self.settings.names.shared is not None:
            yield from cast(Expert, self._child(self.settings.names.shared)).linears()


def mixtures(model: nn.Module) -> dict[str, Experts]:
    """Returns the experts of every mixture in `model`, by the name of the mixture."""
    modules = model.named_modules()
    return {name.rpartition(".")[0]: module for name, module in modules if isinstance(module, Experts)}


@contextmanager
def route_to_all_experts(model: nn.Module) -> Iterator[None]:
    """A context in which every token runs through all experts of `model`; see `Experts`."""
    experts = mixtures(model).values()
    try:
        for mixture in experts:
            mixture.route_to_all_experts = True
        yield
    finally:
        for mixture in experts:
            mixture.route_to_all_experts = False


def reset_token_counts(model: nn.Module) -> None:
    """Sets the token counts of all mixtures in `model` to 0."""
    for mixture in mixtures(model).values():
        mixture.tokens.zero_()


def expert_row_counts(model: nn.Module) -> dict[str, int]:
    """Returns the number of rows that each linear of an expert has computed, by the linear's name in `model`."""
    counts: dict[str, int] = {}
    for name, mixture in mixtures(model).items():
        for index, (expert, rows) in enumerate(zip(mixture, mixture.tokens.tolist(), strict=True)):
            counts |= {f"{name}.experts.{index}.{leaf}": rows for leaf in cast(Expert, expert).names}
    return counts


class GroupRouter(nn.Module):
    """DeepSeek's router: returns FP32 logits [T, experts] for x [T, hidden].

    V3's router has a correction that balances the experts' load. `Mixture` adds it to the scores when it chooses
    experts, but not to their weights. The correction is not trained by gradients.
    """

    weight: nn.Parameter

    def __init__(self, inputs: int, experts: int, routing: Routing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inputs))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear does
        correction = nn.Parameter(torch.zeros(experts), requires_grad=False) if routing.sigmoid else None
        self.register_parameter(CORRECTION, correction)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, None, torch.float32)


class _ChooseExperts(torch.autograd.Function):
    """The op choose_experts with a gradient: that of `routing_weights`, which computes the same weights."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, correction: Tensor | None, *options: Any) -> ExpertChoice:
        _, scores, _, _, normalizes, scale, dtype = options
        chosen, weights = _choose_experts(logits, correction, *options)
        ctx.save_for_backward(logits, chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.weigh = partial(routing_weights, scores=scores, normalizes=normalizes, scale=scale, dtype=dtype)
        return chosen, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            weights = ctx.weigh(logits, chosen)
        return *torch.autograd.grad(weights, logits, grad), *[None] * 8


def sparsemixer(logits: Tensor, threshold: float) -> ExpertChoice:
    """Returns sparsemixer's choice for logits [T, experts]: experts int64 [T, 2], and weights in the logits' dtype.

    It chooses the expert with the largest logit, then the one with the second largest. The weight of each comes from a
    softmax over the experts whose logits are close to its own.
    """
    first_weight, first = _best_of(logits, logits, threshold)
    second_weight, second = _best_of(logits.scatter(-1, first, -torch.inf), logits, threshold)
    return torch.cat((first, second), -1), torch.cat((first_weight, second_weight), -1)


def _best_of(candidates: Tensor, logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Returns (weight, index) [T, 1] of the largest of `candidates`, which are the logits with -inf for chosen
    experts."""
    with torch.no_grad():
        largest, index = candidates.max(-1, keepdim=True)
        is_far = (largest - logits) / logits.abs().clamp(min=largest) > threshold
    return candidates.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, index), index
