"""All uses of private names of PyTorch in this package.

An upgrade of PyTorch may remove private names. tests/fp8/test_torch_private.py lists them and fails if one is missing
or another module uses a private name. Names that are slow to import are imported inside functions.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.module import _has_any_global_hook

Function = TypeVar("Function")
Hooks = tuple[Callable[..., Any], Callable[..., Any]]  # pack and unpack of saved tensors

plain_torch_function: Any = torch._C._disabled_torch_function_impl
preserving_version: Callable[[Tensor], AbstractContextManager[None]] = _unsafe_preserve_version_counter
has_global_hooks: Callable[[], bool] = _has_any_global_hook


def constant_in_graphs(function: Function) -> Function:
    """Makes torch.compile call `function` while it traces and use the result as a constant in the graph.

    `torch.compiler.assume_constant_result` does the same, but imports TorchDynamo, Inductor, SymPy and more, which took
    half of a server's startup time without a model. tests/fp8/test_compile.py checks that torch.compile still reads the
    attribute, and tests/test_startup.py that the compiler is not imported.
    """
    decorated: Any = function
    decorated._dynamo_marked_constant = True
    return function


def backward_pass() -> int | None:
    """Returns the id of the backward pass that is running in this thread, or None outside of one."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def keep_compiler_out(function: Function) -> Function:
    """Excludes `function` and its callees from compilation: the graph breaks at the call.

    `torch.compiler.disable` does the same, but imports TorchDynamo and adds a call of its own.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(cast(Any, function).__code__, frames._FrameExecStrategy(skip, skip))
    return function


def mark_rows_dynamic(tensor: Tensor) -> None:
    """Makes torch.compile compile for any number of rows, unless the code depends on the number."""
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(tensor, 0)


@contextmanager
def compilations_timed(on_end: Callable[[bool, float], None]) -> Iterator[None]:
    """Calls `on_end(is_backward, seconds)` after each compilation in the block.

    `is_backward` is True if only a backward pass was compiled, which may happen when it first runs.
    """
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    start = 0.0

    def begin(_: Any) -> None:
        nonlocal start
        start = time.monotonic()

    def end(arguments: Any) -> None:
        on_end(arguments.callback_trigger is CallbackTrigger.LAZY_BACKWARD, time.monotonic() - start)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Returns the base classes of the errors that torch.compile raises."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return TorchDynamoException, FailOnRecompileLimitHit, CppCompileError, InvalidCxxCompiler


def is_transformed() -> bool:
    """Returns whether a transform of torch.func, such as vmap, or forward-mode differentiation is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Registers a function to be called when the running backward pass ends.

    The autograd engine holds `callback` until the backward pass ends or fails.
    """
    Variable._execution_engine.queue_callback(callback)


def is_checkpointed_forward() -> bool:
    """Returns whether a reentrant checkpoint is running its first forward pass, without gradients."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    if checkpoint is None or torch.is_grad_enabled():
        return False
    code, frame = checkpoint.CheckpointFunction.forward.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def saves_with_hooks() -> bool:
    """Returns whether any saved-tensor hooks are active."""
    autograd: Any = torch._C._autograd
    return autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensor_hooks() -> list[Hooks]:
    """Returns the active saved-tensor hooks, innermost first. All hooks are popped and pushed again to read them."""
    autograd: Any = torch._C._autograd
    removed: list[Hooks] = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        removed.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(removed):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    return removed


def is_checkpoint_frame(value: object) -> bool:
    """Returns whether the value is torch's object for a checkpointed region."""
    from torch.utils.checkpoint import _CheckpointFrame

    return isinstance(value, _CheckpointFrame)


def wrapper(cls: type[Tensor], size: torch.Size, **place: Any) -> Any:
    """Returns a tensor of the subclass `cls` that has a size, but no memory of its own."""
    return cast(Any, torch.Tensor._make_wrapper_subclass)(cls, size, **place)


def map_tensors(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns nested tuples, lists and dictionaries with `function` applied to every leaf."""
    from torch.utils._pytree import tree_map

    return tree_map(function, tree)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to the target of the same index, in one call."""
    torch._foreach_copy_(list(targets), list(sources))


def multiply_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies each tensor by the factor in place, in one call."""
    torch._foreach_mul_(list(tensors), factor)


def has_kernel(op: str, key: str) -> bool:
    """Returns whether an op ("fp8serve::quantize") has its own kernel for a dispatch key ("CPU")."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))


def initialize_fsdp_shards(module: Any) -> None:
    """Makes FSDP2 allocate the shards of a root module, which it would otherwise do in the first forward pass."""
    module._get_fsdp_state()._lazy_init()


def clear_dtensor_caches() -> None:
    """Clears the caches of DTensor, which hold device meshes and with them process groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
