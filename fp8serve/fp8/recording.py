"""Functions through which layers prepare their states, stage amaxes and add themselves to the running step.

Inside torch.compile each call becomes a node of the graph, which makes the same call when the graph runs. The node
gets the ids of the module and of the update config (session.py), because a graph cannot hold objects. The module's id
is an input of the graph. Layers with the same code and shapes share one graph if their session says that their states
exist (`prepared_length`), because states are created by a call that the graph holds as a constant.
"""

import torch
from torch import Tensor

from fp8serve.fp8.autocast import current_step, is_inside_context
from fp8serve.fp8.ops import implement
from fp8serve.fp8.scaling import Direction
from fp8serve.fp8.session import MODULES, UPDATE_CONFIGS, UpdateConfig
from fp8serve.fp8.stateful import Stateful
from fp8serve.fp8.steps import backward_step
from fp8serve.fp8.torch_private import constant_in_graphs, is_checkpointed_forward


def prepare_module(
    module: Stateful, config_id: int, config: UpdateConfig | None, history_len: int, is_recording: bool
) -> None:
    """Creates or resizes the states of a module before it runs under an update config.

    If `is_recording` is False, the module quantizes with its present scales. torch.compile runs this while it traces,
    not in the graph. Raises RecipeError if the config reduces the amaxes of another session.
    """
    if torch.compiler.is_compiling() or config is None:
        has_other_session = config is None or module.session is not config.session
        if has_other_session or not is_recording or module.session.prepared_length != history_len:
            _prepare_module_by_id(module.key, config_id, history_len, is_recording)
    else:
        _prepare_module(module, config, history_len, is_recording)


@constant_in_graphs
def _prepare_module_by_id(module_key: int, config_id: int, history_len: int, is_recording: bool) -> bool:
    _prepare_module(MODULES[module_key], UPDATE_CONFIGS[config_id], history_len, is_recording)
    return True


def _prepare_module(module: Stateful, config: UpdateConfig, history_len: int, is_recording: bool) -> None:
    config.check_module(module)
    module.prepare(history_len)
    if not (is_recording or module.is_evaluated):
        if is_checkpointed_forward():  # the backward pass runs the layer again and records amaxes then
            return
        module.is_evaluated = True
        if not _has_history(module):
            current_step().without_history.append(module)


def separate_states(module: Stateful) -> None:
    """Gives the module states of its own before it runs alone. torch.compile runs this while it traces."""
    if torch.compiler.is_compiling():
        _separate_states_by_key(module.key)
    else:
        module.separate_states()


@constant_in_graphs
def _separate_states_by_key(module_key: int) -> bool:
    MODULES[module_key].separate_states()
    return True


def can_read(tensor: Tensor) -> bool:
    """Returns whether the program can read the values of a tensor now: it has values, and no CUDA graph is captured."""
    return not (tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()))


def _has_history(module: Stateful) -> bool:
    """Returns whether any scale of the forward pass was ever set, or True if it cannot be read. Waits for the GPU."""
    states = [module.scaling[name] for name in module.tensors["forward"]]
    if not can_read(states[0].amax_history):
        return True
    return any(bool(s.amax_history.any()) or float(s.scale) != 1.0 for s in states)


def expect_backward(history: Tensor, config_id: int, config: UpdateConfig) -> None:
    """Announces that a backward pass will stage gradients' amaxes under an update config, which other ranks must know.

    `history` is any amax history of the module; it makes the node of a compiled graph depend on the module.
    """
    if torch.compiler.is_compiling():
        torch.ops.fp8serve.expect_backward(history, config_id)
    else:
        current_step().configs_with_backward.add(config)


def _expect_backward_in_graph(history: Tensor, config_id: int) -> None:
    config = UPDATE_CONFIGS[config_id]
    # The graph's backward pass has the id only, which does not keep the config alive.
    config.session.retain_config(config_id, config)
    current_step().configs_with_backward.add(config)


ModuleKey = int | Tensor  # a module's id; in a compiled graph, the tensor that holds it


def module_key(module: Stateful) -> ModuleKey:
    """Returns the key by which a module's calls are recorded."""
    return module.key_tensor if torch.compiler.is_compiling() else module.key


def record_amax(direction: Direction, history: Tensor, amax: Tensor, module_key: ModuleKey, config_id: int) -> None:
    """Raises the staging slot of a history to `amax` and adds the module to the running step."""
    if torch.compiler.is_compiling():
        torch.ops.fp8serve.record_amax(history, amax, module_key, config_id, direction)
    else:
        _record_amax(history, amax, module_key, config_id, direction)


def _record_amax(history: Tensor, amax: Tensor, module_key: ModuleKey, config_id: int, direction: str) -> None:
    slot = history[0]
    torch.maximum(slot, amax, out=slot)
    add_to_step(direction, module_key, config_id)


def add_to_step(direction: str, module_key: ModuleKey, config_id: int) -> None:
    """Adds a module to the running step, after an op has raised the staging slot of its history."""
    step = current_step() if direction == "forward" else backward_step()
    if direction == "forward" and is_inside_context():
        step.loop_detector.count_staged_amax()
    module, config = MODULES.get(int(module_key)), UPDATE_CONFIGS.get(config_id)
    # The model may be freed before its backward pass runs. A graph of torch.export updates its own copies of the
    # states, and the module that the key finds has no states.
    if module is not None and config is not None and module.scaling:
        step.add_module(module, config)


def _record_amax_in_graph(history: Tensor, amax: Tensor, module_key: Tensor, config_id: int, direction: str) -> None:
    """Records an amax, and moves the scale to a new tensor for the coming update.

    A graph that recomputes activations in its backward pass holds the old tensor, with the scale of its forward pass.
    """
    _record_amax(history, amax, module_key, config_id, direction)
    module = MODULES.get(int(module_key))
    if module is not None and direction == "forward":
        states = [module.scaling[name] for name in module.tensors["forward"] if module.scaling]
        # A compiler may stage in a copy of the history and write it back later. Then the state is unknown: move all.
        staged = [s for s in states if s.amax_history.data_ptr() == history.data_ptr()]
        for state in staged or states:
            state.scale = state.scale.clone()


implement("record_amax", _record_amax_in_graph)
implement("expect_backward", _expect_backward_in_graph)
