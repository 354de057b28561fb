"""Every private name of PyTorch that this package uses, and its purpose.

Private names may disappear in an upgrade. NAMES lists them; tests/fp8/test_torch_private.py reports missing ones and
allows no private name in other modules. Names that cost time to import are looked up where they are used.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

NAMES = {
    "torch._C._current_graph_task_id": "tells which backward pass is running",
    "torch.autograd.Variable._execution_engine.queue_callback": "calls back when it ends",
    "torch._C._autograd._top_saved_tensors_default_hooks": "finds the checkpointed region that is running",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "finds those around it",
    "torch._C._autograd._push_saved_tensors_default_hooks": "puts their hooks back",
    "torch.utils.checkpoint._CheckpointFrame": "is what such a region is known by",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "renews a weight that a graph has saved",
    "torch._C._disabled_torch_function_impl": "keeps Python out of a tensor subclass's plain functions",
    "torch.Tensor._make_wrapper_subclass": "makes a tensor that holds other tensors",
    "torch.utils._pytree.tree_map": "reaches tensors inside of arguments",
    "torch._foreach_copy_": "copies many small tensors in one call",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "has FSDP2 put shards where they stay",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "makes DTensor forget the process groups it has seen",
    "torch._C._functorch.peek_interpreter_stack": "tells whether a transform of torch.func is running",
    "torch.autograd.forward_ad._current_level": "tells whether differentiation in forward mode is running",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "keeps TorchDynamo out of a function and all that it calls",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "tells which device has a kernel for an op",
}
MAY_BE_MISSING = {"torch._C._cuda_getDriverVersion": "is there in a torch that was built with CUDA"}

Function = TypeVar("Function")
Hooks = tuple[Callable[..., Any], Callable[..., Any]]  # pack and unpack of saved tensors

plain_torch_function: Any = torch._C._disabled_torch_function_impl
preserving_version: Callable[[Tensor], AbstractContextManager[None]] = _unsafe_preserve_version_counter


def constant_in_graphs(function: Function) -> Function:
    """Run `function` while torch.compile traces, not in the graph: its result does not change afterwards.

    `torch.compiler.assume_constant_result` imports TorchDynamo, and with it Inductor, SymPy and more, merely to set
    this attribute: that took half of a server's startup before it looked at its model. tests/fp8/test_compile.py checks
    that graphs still honour the mark, and tests/test_startup.py that nothing imports the compiler for it.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def backward_pass() -> int | None:
    """The number of the backward pass that is running in this thread; None outside of one."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def keep_compiler_out(function: Function) -> Function:
    """Never compile `function`, nor what it calls: a graph ends before the call and another begins after it.

    As `torch.compiler.disable`, which imports TorchDynamo, and adds a call of its own.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(cast(Any, function).__code__, frames._FrameExecStrategy(skip, skip))
    return function


def is_transformed() -> bool:
    """Whether a transform of torch.func, such as vmap, or differentiation in forward mode is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call back when the running backward pass has ended; the engine holds `callback` until then, or until it fails."""
    Variable._execution_engine.queue_callback(callback)


def is_checkpointed_forward() -> bool:
    """Whether a reentrant checkpoint is running its function for the first time, without gradients."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    if checkpoint is None or torch.is_grad_enabled():
        return False
    code, frame = checkpoint.CheckpointFunction.forward.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def saves_with_hooks() -> bool:
    """Whether any hook is in force for the tensors that autograd saves; cheap."""
    autograd: Any = torch._C._autograd
    return autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensor_hooks() -> list[Hooks]:
    """The hooks in force for the tensors that autograd saves, innermost first.

    Looking below the top means taking hooks off and putting them back on.
    """
    autograd: Any = torch._C._autograd
    removed: list[Hooks] = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        removed.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(removed):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    return removed


def is_checkpoint_frame(value: object) -> bool:
    """Whether this is torch's object for a checkpointed region."""
    from torch.utils.checkpoint import _CheckpointFrame

    return isinstance(value, _CheckpointFrame)


def wrapper(cls: type[Tensor], size: torch.Size, **place: Any) -> Any:
    """A tensor of subclass `cls` that has a size, but no memory of its own."""
    return cast(Any, torch.Tensor._make_wrapper_subclass)(cls, size, **place)


def map_tensors(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` of every leaf of nested tuples, lists and dictionaries."""
    from torch.utils._pytree import tree_map

    return tree_map(function, tree)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """targets[i].copy_(sources[i]) for all of them, in one call."""
    torch._foreach_copy_(list(targets), list(sources))


def has_kernel(op: str, key: str) -> bool:
    """Whether an op ("fp8serve::quantize") has a kernel of its own for a dispatch key ("CPU")."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))


def cuda_driver_version() -> int:
    """The CUDA version that the driver is for, 13020 for 13.2; 0 without a driver, or without a torch that asks it."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return ask() if ask is not None else 0


def settle_shards(module: Any) -> None:
    """Have FSDP2 put the shards of a root module to where they stay, which it does otherwise in the first forward
    pass."""
    module._get_fsdp_state()._lazy_init()


def forget_shardings() -> None:
    """Clear DTensor's caches, which keep meshes and with them process groups; nothing if it was never imported."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
