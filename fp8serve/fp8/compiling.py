"""A mark for torch.compile that does not load it.

`torch.compiler.assume_constant_result` imports TorchDynamo, and with it Inductor, SymPy and more, merely to set one
attribute: that was half of what a server's process did before it looked at its model. tests/fp8/test_compile.py and
tests/test_startup.py hold both ends: graphs still honour the mark, and nothing imports the compiler for it.
"""

from typing import Any, TypeVar

Function = TypeVar("Function")


def constant_in_graphs(function: Function) -> Function:
    """Run `function` while torch.compile traces, not in the graph: its result does not change afterwards."""
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
