"""Runs every kernel on an emulated GPU compiled with ThreadSanitizer, in a process of its own (test_races.py).

    LD_PRELOAD=libtsan.so setarch -R python -m tests.cuda.race_run barriers | written-weights

`barriers` runs every kernel, with the threads of a block in order and in reverse order. A race ends the process with a
report. After the first run that reaches a barrier or wait, it repeats the run without this barrier, and prints a line
that states how the fault was detected. `written-weights` treats stored weights as results of the previous kernel, and
prints how this was detected: ops must not read such weights before they wait.

The emulated GPU is like sm_120, where launches start early, before earlier kernels have ended. All arguments except
stored weights count as results of an earlier kernel, so a kernel that reads them before it waits has a race, too.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp8serve.fp8.ops import Case, cases
from fp8serve.fp8.ops.gemm import normed_case
from fp8serve.fp8.selfcheck.child import flatten_tensors
from tests.csrc.test_sample import arguments
from tests.cuda import emulated
from tests.cuda.accumulation import assert_within_accumulation
from tests.cuda.conftest import Kernels
from tests.cuda.test_attention import Paged
from tests.cuda.test_gemm import operands
from tests.cuda.test_sample import NEUTRAL, assert_drawn

# Ops with small cases: for each of these words, the first case with the word in its name. A barrier is removed in the
# first run that reaches it, so that run must need it: rows of one warp do not need the barriers of a block.
WORDS: dict[str, tuple[str, ...]] = {
    "quantize_watched": tuple(
        f"(130, 1032) {kind} torch.float32 scale 230.0 rows 2" for kind in ("plain", "norm", "gated")
    ),
    "delayed_update": ("N=1024, 9 states, (0, 1, 'max')",),
    "greedy_tokens": ("7 x 16384 torch.bfloat16",),
    "grouped_quantize": ("even, 64",),
    "layer_norm_quantize": ("(33, 300)",),
    "quantize": ("tiles 64x256",),
    "quantize_block": ("(1, False)", "(128, False)", "(1, True)"),
    "quantize_current": ("(False,)",),
    "quantize_delayed": ("tiles 64x256",),
    "quantize_rowwise": ("(False,)",),
    "quantize_transpose": ("tiles 64x256",),
    "rms_norm": ("",),
    "rms_norm_backward": ("torch.float32 (5, 70)",),
    "rms_norm_quantize": ("(33, 300)",),
    "rms_norm_quantize_delayed": ("torch.bfloat16 (144, 136)",),
    "rotary": ("",),
    "rotary_write_kv": ("",),
    "silu_mul": ("",),
    "silu_mul_backward_quantize_delayed": ("torch.bfloat16 (144, 136)",),
    "silu_mul_quantize_delayed": ("torch.bfloat16 (144, 136)",),
    "transpose_fp8": ("",),
    "transpose_half": ("",),
    "watched_mm_add": ("(1, 40, 1200) tensor torch.bfloat16", "(33, 16, 144) row torch.bfloat16"),
    "stored_mm": ("(5, 130, 2064) ('tensor', 'row')", "(17, 16, 144) ('1x128'"),
    "scaled_mm_add": ("",),
    "stored_gated_mm": ("(5, 96, 1200)",),
    "stored_rotary_mm": ("(5, 4, 2, 80) row torch.bfloat16",),
    "write_kv": ("",),
}
STORED_WEIGHTS = {
    "stored_mm": 1,
    "stored_gated_mm": 1,
    "stored_rotary_mm": 1,
    "scaled_mm_add": 1,
    "watched_mm_add": 5,
}  # index of the argument
# Exit statuses. RACE is ThreadSanitizer's own. REFUSED: the emulator found threads that wait for ever, or an
# instruction that is used against its rules.
RACE, WRONG, REFUSED = 66, 65, 64
CHIP, HOPPER = (120, 4, 99 * 1024), (90, 4, 227 * 1024)
LONG, RESIDUAL = torch.ones(2, 32776), torch.ones(70, 72)
Run = tuple[str, Callable[[Kernels], Any]]


def runs() -> Iterator[Run]:
    """Yields (name, run) for every kernel, with inputs that reach each of its barriers."""
    for op, words in WORDS.items():
        for word in words:
            case = next(case for case in cases(op) if word in case.name)
            yield f"{op} {case.name}", lambda kernels, op=op, case=case: getattr(kernels.ops, op)(*case.make())
    yield (
        "quantize_rowwise, long rows",
        lambda kernels: kernels.run("quantize_rowwise", LONG, torch.float8_e4m3fn, False),
    )
    for vocab in (5000, 8200):  # by one block, and by several
        yield f"sample of {vocab}", lambda kernels, vocab=vocab: draw(kernels, vocab)
    for rows, k in ((5, 1200), (70, 656)):  # the skinny kernel with two teams, and the mma kernel
        for by in ("tensor", "1x128"):
            yield f"scaled_mm {rows} rows, {by}", partial(multiply, rows=rows, k=k, by=by)
    for by in ("tensor", "1x128"):
        yield f"scaled_mm by the tall kernel, {by}", partial(multiply, rows=70, k=656, by=by, kernel="tall")
    yield "stored_mm of a norm", multiply_norm
    yield "scaled_mm_add by mma", lambda kernels: kernels.run("scaled_mm_add", *operands(70, 72, 64), None, RESIDUAL)
    yield "grouped_mm of a few rows", multiply_experts
    yield "paged_attention FP32", lambda kernels: attend(kernels, torch.float32, 20, keys=600)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        yield f"paged_attention {dtype}", lambda kernels, dtype=dtype: attend(kernels, dtype, 32)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        yield f"paged_attention {dtype} of a prompt on Hopper", partial(attend_to_prompt, dtype=dtype)


class AfterOthers:
    """Ops whose arguments, except stored weights, count as results of an earlier kernel."""

    def __init__(self, gpu: emulated.Emulator, stored_weights: dict[str, int]) -> None:
        self._gpu, self._stored_weights = gpu, stored_weights
        self.set_chip = gpu.set_chip

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            stored = self._stored_weights.get(op)
            self._gpu.write_earlier(flatten_tensors(*(x for i, x in enumerate(arguments) if i != stored)))
            try:
                return getattr(self._gpu.ops, op)(*arguments)
            finally:
                self._gpu.write_earlier([])

        return run


@contextmanager
def on_hopper(kernels: Kernels) -> Iterator[None]:
    kernels.ops.set_chip(*HOPPER)
    try:
        yield
    finally:
        kernels.ops.set_chip(*CHIP)


def multiply(kernels: Kernels, rows: int, k: int, by: str, kernel: str = "") -> None:
    """Multiplies; few rows run on Hopper, whose shared memory has space for two teams."""
    a, b, a_scale, b_scale = operands(rows, 72, k, by, by)
    op, named = ("scaled_mm_by", (kernel, 1)) if kernel else ("scaled_mm", ())
    with on_hopper(kernels) if rows <= 16 else nullcontext():
        actual = kernels.run(op, a, b, a_scale, b_scale, None, torch.float32, *named)
    assert_within_accumulation(actual, a, b, a_scale, b_scale)


def multiply_norm(kernels: Kernels) -> None:
    """Casts a norm of 528 inputs, which need all warps of a team, in the product."""
    case = next(case for case in cases("stored_mm") if "(3, 24, 200) ('tensor', 'row')" in case.name)
    a, b, *rest = case.make()
    a, b = (x.repeat(1, 3)[:, :528].contiguous() for x in (a, b))
    expected = kernels.run("stored_mm", *normed_case(Case("", lambda: (a, b, *rest))).make())
    kernels.ops.gemm_kernels(a, "none")
    actual = kernels.run("stored_mm", *normed_case(Case("", lambda: (a, b, *rest))).make())
    kernels.ops.gemm_kernels(a, "normed")
    assert torch.equal(actual, expected)


def draw(kernels: Kernels, vocab: int) -> None:
    """Samples with filters, which reach every barrier of the search, and without."""
    args = arguments(vocab, 3, vocab, True)
    assert_drawn(kernels.run("sample", *args), args)
    for place, neutral in NEUTRAL.items():
        args[place].fill_(neutral)
    assert_drawn(kernels.run("sample", *args), args)


def multiply_experts(kernels: Kernels) -> None:
    one, ends = torch.tensor(1.0), torch.tensor([2, 3], dtype=torch.int32)
    a, b = (torch.ones(n, 1200).to(torch.float8_e4m3fn) for n in (3, 16))
    actual = kernels.run("grouped_mm", a, b.view(2, 8, 1200), one, torch.ones(2), ends, None, torch.bfloat16)
    assert bool((actual == 1200).all())


def attend(kernels: Kernels, dtype: torch.dtype, dim: int, keys: int = 300) -> None:
    """Runs attention for a chunk of a prompt, and for decoding over several segments."""
    paged = Paged([keys, 40], heads=4, kv_heads=2, dim=dim, dtype=dtype)
    paged.attend(kernels, [(0, keys - 30, keys), (1, 0, 40)])
    paged.attend(kernels, [(0, keys - 1, keys), (1, 39, 40)])


def attend_to_prompt(kernels: Kernels, dtype: torch.dtype) -> None:
    """Runs two warpgroups, the second with fewer rows, over more tiles of keys than the pipeline has stages."""
    paged = Paged([300], heads=2, kv_heads=1, dim=64, dtype=dtype)
    with on_hopper(kernels):
        paged.attend(kernels, [(0, 260, 300)])


def print_line(text: str) -> None:
    print(text, flush=True)


def barriers(gpu: emulated.Emulator, kernels: Kernels) -> None:
    reached: set[str] = set()
    for backwards in (False, True):
        for name, run in runs():
            print_line(f"RUN {name}")
            gpu.run_backwards(backwards)
            run(kernels)
            for site in sorted(gpu.take_reached_sites() - reached):
                reached.add(site)
                print_line(f"WITHOUT {site} {name}: {detection(gpu, kernels, site, run)}")
    print_line(f"MET {' '.join(sorted(reached))}")


def written_weights(gpu: emulated.Emulator, kernels: Kernels) -> None:
    everything_written = Kernels(AfterOthers(gpu, {}), "cpu")
    for name, run in runs():
        if name.partition(" ")[0] in STORED_WEIGHTS:
            run(kernels)
            print_line(f"WRITTEN {name}: {detection(gpu, everything_written, '', run)}")


def detection(gpu: emulated.Emulator, kernels: Kernels, site: str, run: Callable[[Kernels], Any]) -> str:
    """Runs in a child process, which the first race ends; returns how the fault was detected."""
    child = os.fork()
    if child == 0:
        gpu.leave_out(site)
        try:
            for backwards in (False, True):
                gpu.run_backwards(backwards)
                run(kernels)
        except AssertionError:
            os._exit(WRONG)
        except RuntimeError:
            os._exit(REFUSED)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {RACE: "race", WRONG: "wrong results", REFUSED: "refused", 0: "not found"}[status]


if __name__ == "__main__":
    torch.set_num_threads(1)
    emulator = emulated.Emulator(Path(emulated.build(emulated.RACES)))
    emulator.set_chip(*CHIP)
    kernels = Kernels(AfterOthers(emulator, STORED_WEIGHTS), "cpu")
    modes = {"barriers": barriers, "written-weights": written_weights}
    modes[sys.argv[1]](emulator, kernels)
    print_line("DONE")
