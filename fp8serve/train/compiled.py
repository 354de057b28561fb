"""Compiles the layers of a fine-tune with torch.compile (`--compile`).

Three functions of each layer are compiled: attention's projections with the norm before them, its output projection,
and the MLP. Attention itself, whose code depends on the lengths of the rows, runs as always, and so do mixtures of
experts. The number of tokens is dynamic, and everything that differs between layers is an input of the graph. So one
graph serves all layers and all batches: a model of any depth is compiled in the time of one layer.

Only the passes of training steps run compiled, and of these not the steps in which the monitor of a run counts values
(`train.health`: the first and every sixteenth), because a compiled graph calls no observer. Validation, reference
scores and the first observation of scales run the same functions without the compiler. Casts, products, RMSNorm and
SiLU are the same ops with and without the compiler, which replaces what is between them, such as additions, and
Python's work. OPTIONS make it round and draw random numbers as PyTorch does.

If the functions are compiled MAX_GRAPHS times, their inputs keep changing in a way that was not foreseen. The
run then continues without the compiler, and an event says so.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8serve.errors import JobError, one_line
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.torch_private import compilations_timed, compiler_errors, mark_rows_dynamic
from fp8serve.model.building import Model
from fp8serve.model.network.decoder import MLP, ApertusMLP
from fp8serve.model.network.fusion import Projections
from fp8serve.train.events import OnEvent, message

MAX_GRAPHS = 8  # forward passes that are compiled; torch compiles a function at most 8 times by default
BACKEND: str | Callable[..., Any] = "inductor"  # tests replace it, and OPTIONS
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True, "fallback_random": True}

TRACER_WARNING = r"The \.grad attribute of a Tensor that is not a leaf"  # the tracer looks at it for every input


class CompiledLayers:
    """The compiled functions of a decoder's layers. They replace the layers' own in passes inside of `running`."""

    def __init__(self, decoder: Model) -> None:
        torch.compiler.reset()  # an earlier model's graphs would count against torch's limit
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._linears = [module for module in decoder.modules() if isinstance(module, Linear)]
        self._is_running = False
        self._graphs, self._step_graphs, self._step_seconds = 0, 0, 0.0
        for layer in decoder.parts:
            attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule(layer.mlp_name)  # type: ignore[arg-type]
            self._replace(attention, "heads", attention.qkv)  # type: ignore[arg-type]
            self._replace(attention, "add_output")
            if isinstance(mlp, MLP | ApertusMLP):
                self._replace(mlp, "forward", mlp.gate_up if isinstance(mlp, MLP) else mlp.up)

    def _replace(self, module: nn.Module, name: str, projections: Projections | None = None) -> None:
        """Replaces a method, whose first argument is a tensor [T, ...]. It calls `projections`, if given, first."""
        method: Callable[..., Any] = getattr(type(module), name)
        if method not in self._compiled:
            self._compiled[method] = torch.compile(method, fullgraph=True, backend=BACKEND, options=OPTIONS)
        compiled = self._compiled[method]

        def run(x: Tensor, *arguments: Any) -> Any:
            if not (self._is_running and torch.is_grad_enabled() and self._graphs < MAX_GRAPHS):
                return method(module, x, *arguments)
            if projections is not None:
                projections.prepare_compiled()
            for tensor in (x, *arguments):
                if isinstance(tensor, Tensor):
                    mark_rows_dynamic(tensor)
            return compiled(module, x, *arguments)

        setattr(module, name, run)

    @contextmanager
    def running(self, on_event: OnEvent, step: int) -> Iterator[None]:
        """Runs the passes of a step compiled, unless layers are observed, and reports what was compiled.

        Raises JobError if the compiler fails.
        """
        if any(linear.observer is not None for linear in self._linears):
            yield
            return
        if not self._graphs:  # not in every step, because a new filter makes Python repeat other warnings
            warnings.filterwarnings("ignore", TRACER_WARNING)
        self._step_graphs, self._step_seconds = 0, 0.0
        was_stopped = self._graphs >= MAX_GRAPHS
        self._is_running = True
        try:
            with compilations_timed(self._count):
                yield
        except compiler_errors() as error:
            raise JobError(
                f"torch.compile cannot compile the model's layers: {one_line(error)}; leave compile out."
            ) from error
        finally:
            self._is_running = False
        if self._step_graphs:
            text = f"torch.compile took {self._step_seconds:.1f} s of step {step}, for {self._step_graphs} graphs"
            seconds = round(self._step_seconds, 3)
            on_event(message("compiled", text, step=step, graphs=self._step_graphs, seconds=seconds))
        if self._graphs >= MAX_GRAPHS and not was_stopped:
            text = (
                f"The layers were compiled {self._graphs} times, because their inputs keep changing: the run continues "
                "without the compiler"
            )
            on_event(message("compile_stopped", text, level="warn", step=step))

    def _count(self, is_backward: bool, seconds: float) -> None:
        self._graphs += not is_backward
        self._step_graphs += not is_backward
        self._step_seconds += seconds
