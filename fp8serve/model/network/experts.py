"""A mixture of experts: a router sends every token through a few of many small MLPs and adds up what they say.

The router is never quantized: its logits are computed in the type of the activations, its softmax and the weights of
the chosen experts in FP32. A token's experts are added in their order, so that its sum does not depend on the order in
which others chose theirs, and every sum is rounded, as in transformers.

Tokens are sorted by expert, and the rows of each expert lie together. Who computes them depends on what the experts'
linears are: serving's frozen ones are stacked (fp8/stacked.py), training's run grouped (fp8/grouped_linear.py), and
all others, such as BF16 ones and those that calibration watches by hooks, are called one expert after the other. All
give the same bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.grouped_linear import Span, grouped_linear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops.grouped import spans
from fp8serve.fp8.stacked import Stacked, can_stack
from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.config.mixture import Experts as ExpertSettings
from fp8serve.model.network.fusing import GATED, Ending
from fp8serve.model.network.memory import free_memory
from fp8serve.model.network.routing import GroupRouter
from fp8serve.model.storage.mapped import release_pages

ROOM = 0.6  # of free memory may become stacked weights; beyond, they stay where they are mapped


class Router(nn.Linear):
    """A linear that `convert` leaves in high precision."""


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """gpt-oss' activation: gate * sigmoid(alpha * gate) * (up + 1), of a gate up to `limit` and an up within it."""
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
        """What goes into `down`."""
        return GATED[self.activation](gate, up) if self.clamp is None else clamped_swiglu(gate, up, *self.clamp)

    def linears(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """gate, up and down."""
        gate, up, down = (cast(nn.Module, self._modules[name]) for name in self.names)
        return gate, up, down


def _router(config: ModelConfig, settings: ExpertSettings) -> nn.Module:
    if settings.routing is not None:
        return GroupRouter(config.hidden_size, settings.count, settings.routing)
    return Router(config.hidden_size, settings.count, bias=settings.bias)


class Sorted(NamedTuple):
    """Tokens by expert. rows int64 [T * k]: the token of each row. places int64 [T * k]: the row of each choice, token
    by token. counts int64 [E]: the rows of each expert. offsets int32 [E]: where they end."""

    rows: Tensor
    places: Tensor
    counts: Tensor
    offsets: Tensor


def sort(chosen: Tensor, experts: int) -> Sorted:
    """chosen int64 [T, k], rising in every row. One token's rows are sorted as they are: at decoding this counts."""
    flat = chosen.reshape(-1)
    as_they_are = torch.arange(len(flat), device=flat.device)
    if len(chosen) == 1:
        rows, places = torch.zeros_like(flat), as_they_are
    else:
        order = flat.argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, as_they_are)
        rows = order // max(chosen.shape[1], 1)
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return Sorted(rows, places, counts, counts.cumsum(0, dtype=torch.int32))


class Experts(nn.ModuleList):
    """The experts of one mixture.

    tokens int64 [E]: how many each expert was given since `reset_counters`. every_expert: all tokens run through all
    experts, whose linears can so be observed; the result stays that of the chosen ones.
    """

    def __init__(self, experts: Iterable[Expert]) -> None:
        super().__init__(experts)
        self.tokens = torch.zeros(len(self), dtype=torch.int64, device="cpu")
        self.every_expert = False
        self._stacks: tuple[Stacked, Stacked] | None = None  # gate and up, down

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen int64 [T, k], rising, weights [T, k] -> what the chosen say, added up by weight."""
        by_expert = sort(chosen, len(self))
        self._count(by_expert.counts)
        said = self._by_every_expert(x, by_expert) if self.every_expert else self._by_chosen(x, by_expert)
        terms = said.index_select(0, by_expert.places).view(*chosen.shape, -1)  # [T, k, hidden]
        terms = (terms * weights.unsqueeze(-1)).to(x.dtype)
        total = terms[:, 0]
        for k in range(1, terms.shape[1]):
            total = total + terms[:, k]
        return total

    def _by_chosen(self, x: Tensor, by_expert: Sorted) -> Tensor:
        """[T * k, hidden]: what each token's experts say, expert by expert."""
        rows, stacks = x.index_select(0, by_expert.rows), self._stacks
        if stacks is not None and not torch.is_grad_enabled() and self._are_current(stacks, by_expert.offsets):
            gate, up = stacks[0](rows, by_expert.offsets).chunk(2, -1)
            return stacks[1](self._gated(gate, up), by_expert.offsets)
        return self._by_linears(rows, spans(by_expert.offsets))

    def _by_linears(self, rows: Tensor, where: Sequence[Span]) -> Tensor:
        gates, ups, downs = zip(*(expert.linears() for expert in self._experts()), strict=True)
        if not all(type(linear) is Linear for linear in (*gates, *ups, *downs)):
            parts = [e(rows[begin:end]) for e, (begin, end) in zip(self._experts(), where, strict=True) if begin < end]
            return torch.cat(parts) if parts else rows
        gated = self._gated(grouped_linear(gates, rows, where), grouped_linear(ups, rows, where))
        return grouped_linear(downs, gated, where)

    def _by_every_expert(self, x: Tensor, by_expert: Sorted) -> Tensor:
        """What `_by_chosen` gives, after every expert has seen all tokens."""
        where = spans(by_expert.offsets)
        parts = [e(x)[by_expert.rows[slice(*span)]] for e, span in zip(self._experts(), where, strict=True)]
        return torch.cat(parts)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._experts()[0].gated(gate, up)

    def _experts(self) -> Sequence[Expert]:
        return cast(Sequence[Expert], self)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _count(self, counts: Tensor) -> None:
        if self.tokens.device != counts.device:
            self.tokens = self.tokens.to(counts.device)
        self.tokens += counts

    def reset_counters(self) -> None:
        """Start counting tokens anew."""
        self.tokens.zero_()

    def join(self) -> None:
        """For serving: the experts' linears become three dimensional where they can and memory allows."""
        experts = list(self._experts())
        gate, up, down = experts[0].names
        groups = (gate, up), (down,)
        linears = [linear for expert in experts for linear in expert.linears()]
        mapped = [linear.weight for linear in linears if isinstance(linear, FrozenLinear)]
        fits = sum(weight.nbytes for weight in mapped) < ROOM * free_memory()
        if not fits or not all(can_stack(experts, names) for names in groups):
            return
        self._stacks = Stacked(experts, groups[0]), Stacked(experts, groups[1])
        for weight in mapped:
            release_pages(weight)

    @property
    def is_stacked(self) -> bool:
        return self._stacks is not None

    def matrices(self) -> Iterator[nn.Module | Stacked]:
        """What a step multiplies by: the stacks, or each linear."""
        if self._stacks is not None:
            yield from (stack for stack in self._stacks if stack.is_packable)
        else:
            yield from (linear for expert in self._experts() for linear in expert.linears())

    def _are_current(self, stacks: tuple[Stacked, Stacked], offsets: Tensor) -> bool:
        used = range(len(offsets)) if offsets.is_cuda else [e for e, (a, b) in enumerate(spans(offsets)) if a < b]
        return all(stack.is_current(used) for stack in stacks)


class Mixture(nn.Module):
    """Router and experts, in the place of a layer's MLP."""

    experts: Experts

    def __init__(self, config: ModelConfig, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings = settings
        names = settings.names
        self.register_module(names.router, _router(config, settings))
        self.experts = Experts(Expert(config, settings.size, settings) for _ in range(settings.count))
        if names.shared is not None and settings.shared_size is not None:
            self.register_module(names.shared, Expert(config, settings.shared_size, settings))
        if names.shared_gate is not None:
            self.register_module(names.shared_gate, Router(config.hidden_size, 1, bias=False))

    def forward(self, x: Tensor, norm: nn.Module, ending: Ending) -> Tensor:
        """x [T, hidden] plus ending(mixture of norm(x))."""
        hidden = norm(x)
        return x + ending(self._shared(self.experts(hidden, *self.choose(hidden)), hidden))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (experts int64 [T, k], rising; their weights [T, k])."""
        router, count = self._child(self.settings.names.router), self.settings.per_token
        logits = router(x)
        if isinstance(router, GroupRouter):
            weights, chosen = router.choose(logits, count)
        elif self.settings.weighs_chosen:
            best, chosen = logits.topk(count, dim=-1)
            weights = best.softmax(-1)
        else:
            weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(count, dim=-1)
        if self.settings.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.settings.routing is not None:
            weights = weights * self.settings.routing.scale
        chosen, order = chosen.sort(-1)
        weights = weights.gather(-1, order)
        return chosen, weights if self.settings.wide_weights else weights.to(logits.dtype)

    def _shared(self, total: Tensor, x: Tensor) -> Tensor:
        names = self.settings.names
        if names.shared is None:
            return total
        said: Tensor = self._child(names.shared)(x)
        if names.shared_gate is not None:
            said = torch.sigmoid(self._child(names.shared_gate)(x)) * said
        return total + said

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
    found = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    return {name.rpartition(".")[0]: experts for name, experts in found.items()}


@contextmanager
def every_expert(model: nn.Module) -> Iterator[None]:
    """Inside, every token runs through every expert, see `Mixture`."""
    found = mixtures(model).values()
    try:
        for mixture in found:
            mixture.every_expert = True
        yield
    finally:
        for mixture in found:
            mixture.every_expert = False


def reset_token_counts(model: nn.Module) -> None:
    """Start counting anew in every mixture of `model`."""
    for mixture in mixtures(model).values():
        mixture.reset_counters()


def rows_of_experts(model: nn.Module) -> dict[str, int]:
    """How many rows every expert's linear has seen, by its name in `model`."""
    found: dict[str, int] = {}
    for name, mixture in mixtures(model).items():
        for index, (expert, rows) in enumerate(zip(mixture, mixture.tokens.tolist(), strict=True)):
            found |= {f"{name}.experts.{index}.{leaf}": rows for leaf in cast(Expert, expert).names}
    return found
