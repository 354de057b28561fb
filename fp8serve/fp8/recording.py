"""How layers report to the running step: that they run, what they staged, and that a backward pass will stage more.

Inside torch.compile each report becomes a node of the graph. The node carries the numbers of the module and the rule
(session.py) and does the same when the graph runs.
"""

import torch
from torch import Tensor

from fp8serve.fp8.autocast import entered, step
from fp8serve.fp8.ops import implement
from fp8serve.fp8.scaling import Direction, Scaled
from fp8serve.fp8.session import MODULES, RULES, Rule
from fp8serve.fp8.steps import backward_step
from fp8serve.fp8.torch_private import constant_in_graphs, is_checkpointed_forward


def prepare(module: Scaled, number: int, rule: Rule | None, length: int, recording: bool) -> None:
    """Create or resize the states of a module that is to run by a rule, which is given with its number.

    Without `recording` the module quantizes with the scales that it has. torch.compile runs this while it traces,
    not in the graph. RecipeError: the rule reduces another session.
    """
    if torch.compiler.is_compiling() or rule is None:
        _prepare_by_number(module.key, number, length, recording)
    else:
        _prepare(module, rule, length, recording)


@constant_in_graphs
def _prepare_by_number(module: int, rule: int, length: int, recording: bool) -> bool:
    _prepare(MODULES[module], RULES[rule], length, recording)
    return True


def _prepare(module: Scaled, rule: Rule, length: int, recording: bool) -> None:
    rule.check(module)
    module.prepare(length)
    if not (recording or module.is_evaluated):
        if is_checkpointed_forward():  # the backward pass runs the layer again, and records then
            return
        module.is_evaluated = True
        if not _has_history(module):
            step().without_history.append(module)


def _has_history(module: Scaled) -> bool:
    """Whether a scale of the forward pass has ever been set; waits for the device. True where it cannot be read."""
    states = [module.scaling[name] for name in module.tensors["forward"]]
    history = states[0].amax_history
    if history.is_meta or (history.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    return any(bool(s.amax_history.any()) or float(s.scale) != 1.0 for s in states)


def expect_backward(history: Tensor, number: int, rule: Rule) -> None:
    """Note that gradients will be staged by the rule, which is given with its number; the other ranks need to know.
    `history`: any that is updated."""
    if torch.compiler.is_compiling():
        torch.ops.fp8serve.expect_backward(history, number)
    else:
        step().expecting.add(rule)


def _expect_backward_of_graph(history: Tensor, rule: int) -> None:
    """A compiled graph carries the number of a rule to its backward pass, and no reference that would keep the rule
    alive."""
    held = RULES[rule]
    held.session.keep(rule, held)
    step().expecting.add(held)


def record(direction: Direction, history: Tensor, amax: Tensor, module: int, rule: int) -> None:
    """Raise the staging slot of a history to `amax` and note that the module ran by the rule."""
    if torch.compiler.is_compiling():
        torch.ops.fp8serve.record_amax(history, amax, module, rule, direction)
    else:
        _record(history, amax, module, rule, direction)


def _record(history: Tensor, amax: Tensor, module: int, rule: int, direction: str) -> None:
    slot = history[0]
    torch.maximum(slot, amax, out=slot)
    recorded(direction, module, rule)


def recorded(direction: str, module: int, rule: int) -> None:
    """Note that a module (by key) ran by a rule (by number), after an op has raised the staging slot itself."""
    running = step() if direction == "forward" else backward_step()
    if direction == "forward" and entered():
        running.watch.staged()
    owner, by = MODULES.get(module), RULES.get(rule)
    # Either may be gone, with the model, before its backward pass runs. A graph of torch.export has states of its own.
    if owner is not None and by is not None and owner.scaling:
        running.add(owner, by)


def _record_in_graph(history: Tensor, amax: Tensor, module: int, rule: int, direction: str) -> None:
    """As `_record`. The scale moves to a new tensor, which the update will change: a graph that recomputes activations
    in its backward pass keeps the tensor that it has read, with the scale of its forward pass."""
    _record(history, amax, module, rule, direction)
    owner = MODULES.get(module)
    if owner is not None and direction == "forward":
        states = [owner.scaling[name] for name in owner.tensors["forward"] if owner.scaling]
        # A compiler may stage in a copy of the history and write it back afterwards: then any may be meant.
        staged = [s for s in states if s.amax_history.data_ptr() == history.data_ptr()]
        for state in staged or states:
            state.scale = state.scale.clone()


implement("record_amax", _record_in_graph)
implement("expect_backward", _expect_backward_of_graph)
