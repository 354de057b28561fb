"""The private names of PyTorch that fp8serve uses exist, and only one module uses them."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8serve
from fp8serve.fp8 import torch_private

ROOT = Path(fp8serve.__file__).parent
PRIVATE_NAMES = {
    "torch._C._current_graph_task_id": "returns the id of the running backward pass",
    "torch.autograd.Variable._execution_engine.queue_callback": "calls a function when the backward pass ends",
    "torch._C._autograd._top_saved_tensors_default_hooks": "returns the hooks of the innermost checkpointed region",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "gives access to the hooks of outer regions",
    "torch._C._autograd._push_saved_tensors_default_hooks": "restores the hooks",
    "torch.utils.checkpoint._CheckpointFrame": "identifies a checkpointed region",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "allows writes to a tensor that a graph has saved",
    "torch._C._disabled_torch_function_impl": "skips __torch_function__ for a tensor subclass",
    "torch.Tensor._make_wrapper_subclass": "creates a tensor that contains other tensors",
    "torch.utils._pytree.tree_map": "finds tensors inside of arguments",
    "torch._foreach_copy_": "copies many small tensors in one call",
    "torch._foreach_mul_": "multiplies many tensors in one call",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "lets FSDP2 allocate its shards before the first forward pass",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "releases the process groups that DTensor has cached",
    "torch._C._functorch.peek_interpreter_stack": "detects a running transform of torch.func",
    "torch.autograd.forward_ad._current_level": "detects forward-mode differentiation",
    "torch._dynamo.maybe_mark_dynamic": "compiles a function for any number of rows",
    "torch._dynamo.callback.callback_handler": "calls a function before and after a compilation",
    "torch._dynamo.callback.CallbackTrigger": "tells compilations of forward and backward passes apart",
    "torch._dynamo.exc.TorchDynamoException": "is the base class of the compiler's errors",
    "torch._dynamo.exc.FailOnRecompileLimitHit": "is raised if a function is compiled too often",
    "torch._inductor.exc.CppCompileError": "is raised if the C++ compiler fails",
    "torch._inductor.exc.InvalidCxxCompiler": "is raised if there is no C++ compiler",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "excludes a function and its callees from compilation",
    "torch.nn.modules.module._has_any_global_hook": "detects hooks of all modules",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "tells whether a device has a kernel for an op",
}
MAY_BE_MISSING = {"torch._C._cuda_getDriverVersion": "exists only if torch was built with CUDA"}


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_torch_has_the_private_name(name: str) -> None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            assert hasattr(target, part), f"torch has no {name} any more; it {PRIVATE_NAMES[name]}"
            target = getattr(target, part)
        return


def test_the_list_is_complete() -> None:
    used = set(private_names(ast.parse(inspect.getsource(torch_private))))
    listed = {**PRIVATE_NAMES, **MAY_BE_MISSING}
    assert {name.rpartition(".")[2] for name in used} <= {part for n in listed for part in n.split(".")}


def test_no_other_module_uses_a_private_name() -> None:
    modules = [path for path in ROOT.rglob("*.py") if path.name != "torch_private.py"]
    assert len(modules) > 100
    assert {str(p): names for p in modules if (names := list(private_names(ast.parse(p.read_text()))))} == {}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yields every attribute or import of torch whose name has a part that begins with one underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{a.name}" for a in node.names if is_private(f"{node.module}.{a.name}"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            is_operator = name.startswith("torch.ops.")  # ATen's names are operators, not attributes of Python
            if name.startswith(("torch.", "Variable.")) and not is_operator and is_private(name):
                yield name


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
