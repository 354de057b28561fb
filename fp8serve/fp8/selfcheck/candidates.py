"""The kernels that a check tries, on what inputs: every op of a library, and by name those that share an op.

On a GPU the kernels of scaled_mm are "scaled_mm.mma", "scaled_mm.large" and so on, those of CUTLASS for experts
"grouped_mm.cutlass", those of attention on tensor cores "paged_attention.mma" and, for Hopper's warpgroups,
"paged_attention.wgmma"; "paged_attention" is then the FP32 kernel. "scaled_mm.overlap" and "paged_attention.overlap"
are these ops behind a kernel that writes what they read, on chips where one kernel may begin before the other has
ended. On a CPU "quantize.avx2" is what runs of an op on a processor that has no more. Kernels that others build upon
come first, so that a fault is found where it is.

A kernel that a check has found wrong is switched off for the whole process, so that the next one takes over. On a GPU a
kernel of products or of attention gives way to the next of its order (csrc/cuda/gemm.cu, attention_tensor.cu), any
other op to its default kernel, and launches that overlap to such that do not. On a CPU every op goes on with the fewest
features less at which none of the wrong variants runs; an op none of whose variants is right goes on with its default
kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.attention import prompt_case
from fp8serve.fp8.ops.gemm import mm_case
from fp8serve.fp8.ops.grouped import grouped_case, wgrad_case
from fp8serve.fp8.ops.libraries import cpu_kernels
from fp8serve.fp8.ops.registry import OPS, Case, cases, compiled_for, replace_by_default

MOST = 30  # cases of a kernel
CAPS = ("best", "avx512+avx512vbmi", "avx512", "avx2", "portable")  # of a CPU's features, best first
TILES = ("large", "medium", "small", "thin128", "thin64", "thin32")
GEMMS = ("skinny", "mma", *TILES, "cublaslt", "cublaslt_rows")
ATTENTION = ("attention_mma", "attention_wgmma")  # on tensor cores, each taking over from the one behind it
NOT_FOR_IT = "which does not multiply this here"  # how a named kernel refuses a problem

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SHAPES = [(1, 16, 16), (5, 40, 400), (17, 136, 272), (64, 128, 128), (129, 264, 400), (300, 512, 640)]
_KINDS = [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")]


@dataclass(frozen=True)
class Candidate:
    """A kernel of an op. `run` takes the op's arguments; where it refuses a case of many with NOT_FOR_IT in its
    RuntimeError, the case does not count."""

    name: str
    op: str
    run: Callable[..., Any]
    cases: Sequence[Case]


def spread(all_cases: Sequence[Case]) -> list[Case]:
    """MOST of the cases, from all over."""
    return list(all_cases[:: -(-len(all_cases) // MOST)]) if all_cases else []


def candidates(device: str, ops: Any = torch.ops.fp8serve) -> Iterator[Candidate]:
    """Those of a device, "cpu" or "cuda:0". `ops`: where the ops are looked up, for an emulated GPU."""
    return _on_cpu() if device == "cpu" else on_gpu(ops)


# --- CPU ------------------------------------------------------------------------------------------------------------


def _on_cpu() -> Iterator[Candidate]:
    seen: set[str] = set()
    for cap in CAPS:
        for op, variant in variants(cap).items():
            if f"{op}.{variant}" not in seen:
                seen.add(f"{op}.{variant}")
                yield Candidate(f"{op}.{variant}", op, partial(_capped, cap, op), spread(cases(op)))


def variants(cap: str) -> dict[str, str]:
    """Caps the features from now on; returns the variant that runs for each op."""
    torch.ops.fp8serve.cpu_isa(cap)
    return {op: kernel["variant"] for op, kernel in cpu_kernels().items() if op in OPS}


def _capped(cap: str, op: str, *arguments: Any) -> Any:
    torch.ops.fp8serve.cpu_isa(cap)
    return getattr(torch.ops.fp8serve, op)(*arguments)


# --- GPU ------------------------------------------------------------------------------------------------------------


def on_gpu(ops: Any) -> Iterator[Candidate]:
    for name in GEMMS:
        yield Candidate(f"scaled_mm.{name}", "scaled_mm", partial(_named, ops, name), _product_cases(name))
    for op in ("grouped_mm", "grouped_wgrad"):
        run = partial(_grouped, ops, op, False)
        yield Candidate(op, op, run, [*spread(for_gpu(op)), *_large[op]()])
    for op in sorted(compiled_for("cuda") & set(OPS)):
        if not op.startswith(("grouped_mm", "grouped_wgrad")):
            chosen = [*spread(for_gpu(op)), *_large.get(op, list)()]
            run = partial(_attending, ops, 0) if op == "paged_attention" else getattr(ops, op)
            yield Candidate(op, op, run, chosen)
    of_bf16 = [case for case in for_gpu("paged_attention") if "bfloat16" in case.name]
    yield Candidate("paged_attention.mma", "paged_attention", partial(_attending, ops, 1), [*of_bf16, *_prompts()[::2]])
    yield Candidate("paged_attention.wgmma", "paged_attention", partial(_attending, ops, 2), _prompts())
    for op in ("grouped_mm", "grouped_wgrad"):
        yield Candidate(f"{op}.cutlass", op, partial(_grouped, ops, op, True), _large[op]())
    yield Candidate(
        "scaled_mm.overlap", "scaled_mm", partial(_overlapping, ops, _behind_its_cast), _product_cases("skinny")
    )
    attention = partial(_overlapping, ops, _behind_its_keys)
    chosen = [*_prompts()[:4], *spread(for_gpu("paged_attention"))]
    yield Candidate("paged_attention.overlap", "paged_attention", attention, chosen)


def for_gpu(op: str) -> list[Case]:
    """The cases of an op without those of packed weights, which only a CPU reads, and BF16 operands beside them."""
    only_on_cpu = ("bfloat16 packed", "packed True") if op == "grouped_mm" else ()
    return [case for case in cases(op) if not any(words in case.name for words in only_on_cpu)]


def _named(ops: Any, name: str, *arguments: Any) -> Tensor:
    """scaled_mm by one of GEMMS; of tiles several rows together for one half of the outputs."""
    rows_together = 1 if arguments[-1] == torch.float32 else 4
    output: Tensor = ops.scaled_mm_by(*arguments, name.removesuffix("_rows"), rows_together)
    return output


def _product_cases(name: str) -> list[Case]:
    """In an order in which any thirty of them have every shape, kind of scale, format and output."""
    kinds = {"cublaslt": _KINDS[:1], "cublaslt_rows": _KINDS[1:2]}.get(name, _KINDS)
    formats = [(_E4M3, _E4M3), (_E5M2, _E4M3), (_E4M3, _E5M2)]
    grid = list(product(_SHAPES, kinds, formats, (torch.bfloat16, torch.float32)))
    order = sorted(range(len(grid)), key=lambda i: i * 5 % len(grid))
    return [
        Case(f"{s} {f[0]} {f[1]} {k} {out}", partial(mm_case, *s, *f, k, out))
        for s, k, f, out in (grid[i] for i in order)
    ]


def _grouped(ops: Any, op: str, cutlass: bool, *arguments: Any) -> Tensor:
    """A product of experts with or without CUTLASS's kernels."""
    here = arguments[0]
    off = set(ops.gemm_kernels(here, "").split("+")) - {"", "grouped_cutlass"}
    ops.gemm_kernels(here, "+".join(sorted(off | (set() if cutlass else {"grouped_cutlass"}))) or "none")
    output: Tensor = getattr(ops, op)(*arguments)
    return output


def _attending(ops: Any, kernels: int, q: Tensor, *others: Any) -> Tensor:
    """Attention with the first so many of the kernels of ATTENTION and without the others."""
    if kernels == 2 and q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        raise RuntimeError(NOT_FOR_IT)
    off = set(ops.gemm_kernels(q, "").split("+")) - {""}
    now = off - set(ATTENTION[:kernels]) | set(ATTENTION[kernels:])
    ops.gemm_kernels(q, "+".join(sorted(now)) or "none")
    try:
        output: Tensor = ops.paged_attention(q, *others)
    finally:
        ops.gemm_kernels(q, "+".join(sorted(off)) or "none")
    return output


def _prompts() -> list[Case]:
    """Prompts of several segments and tiles, behind and beside short sequences, by every kind of cache and option."""
    sinks = torch.tensor([0.5, -4.0, 3.0, 0.0])
    lengths = [(1, 1), (330, 140), (20, 3), (100, 100)]
    caches = (torch.bfloat16, _E4M3, _E5M2)
    grid = product(caches, (64, 80, 128), ((), (100, 2.0, sinks), (33,), (None, 0.5)))
    order = [grid_case for i, grid_case in enumerate(grid) if i % 5 != 4]
    return [
        Case(f"prompts {cache} {dim} {options}", partial(prompt_case, cache, 4, 2, dim, lengths, *options))
        for cache, dim, options in order
    ]


def _overlapping(ops: Any, chain: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """A chain of kernels each of which may begin before the one before has ended; nothing else overlaps in a check."""
    here = arguments[0]
    if here.is_cuda and torch.cuda.get_device_capability(here.device) < (9, 0):
        raise RuntimeError(NOT_FOR_IT)
    off = set(ops.gemm_kernels(here, "").split("+")) - {""}
    ops.gemm_kernels(here, "+".join(sorted(off - {"overlap"})) or "none")
    try:
        return chain(ops, *arguments)
    finally:
        ops.gemm_kernels(here, "+".join(sorted(off)) or "none")


def _behind_its_cast(ops: Any, a: Tensor, *others: Any) -> Tensor:
    """The activations are FP8 values already, which a cast by 1 does not change."""
    again, _ = ops.quantize(a.float(), torch.ones((), device=a.device), a.dtype)
    output: Tensor = ops.scaled_mm(again, *others)
    return output


def _behind_its_keys(ops: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """Keys and values are written into other caches first."""
    if k.itemsize == 1:
        raise RuntimeError(NOT_FOR_IT)
    slots = torch.arange(k.shape[0] * k.shape[1], device=k.device)
    keys, values = torch.zeros_like(k), torch.zeros_like(v)
    ops.write_kv(k.flatten(0, 1), v.flatten(0, 1), keys, values, slots, None, None)
    output: Tensor = ops.paged_attention(q, keys, values, *others)
    return output


def _fused_cases() -> list[Case]:
    """Sizes that CUTLASS takes, with FP8 output."""

    def make(shape: tuple[int, int, int], kinds: tuple[str, str]) -> tuple[Any, ...]:
        *arguments, _ = mm_case(*shape, _E4M3, _E4M3, kinds, torch.bfloat16)
        return *arguments, torch.tensor(0.03), _E4M3

    grid = product([(65, 128, 256), (129, 272, 400), (300, 512, 640)], _KINDS[:2])
    return [Case(f"{shape} {kinds}", partial(make, shape, kinds)) for shape, kinds in grid]


def _expert_cases(make: Callable[..., tuple[Any, ...]], kinds: Sequence[str]) -> list[Case]:
    grid = product(kinds, (_E4M3, _E5M2), (torch.bfloat16, torch.float32))
    return [Case(f"many rows, {kind} {a} {out}", partial(make, kind, a, out)) for kind, a, out in grid]


def _many_rows(kind: str, a: torch.dtype, out: torch.dtype) -> tuple[Any, ...]:
    return grouped_case("many rows", kind, (144, 264), a, False, out)


def _many_columns(kind: str, a: torch.dtype, out: torch.dtype) -> tuple[Any, ...]:
    return wgrad_case("many rows", kind, 144, 160, a, out)


_large: dict[str, Callable[[], list[Case]]] = {  # sizes that CUTLASS takes
    "scaled_mm_quantize": _fused_cases,
    "grouped_mm": partial(_expert_cases, _many_rows, ("expert", "row", "block")),
    "grouped_wgrad": partial(_expert_cases, _many_columns, ("expert", "row", "block")),
}


_GEMM_NAMES = {f"scaled_mm.{name}": name for name in GEMMS}
_GEMM_NAMES |= dict.fromkeys(("grouped_mm.cutlass", "grouped_wgrad.cutlass"), "grouped_cutlass")
_GEMM_NAMES |= {f"paged_{name.replace('_', '.')}": name for name in ATTENTION}
OVERLAP = ("scaled_mm.overlap", "paged_attention.overlap")
_GEMM_NAMES |= dict.fromkeys(OVERLAP, "overlap")


def switch_off(device: torch.device, names: Iterable[str]) -> None:
    """No kernel of these names (candidates.py) runs in this process from now on; unknown names say nothing."""
    if device.type == "cpu":
        _switch_off_on_cpu(set(names))
        return
    switch_products_off(torch.empty(1, device=device), names)
    for name in names:
        if name in OPS:
            replace_by_default(name, "cuda")


def switch_products_off(here: Tensor, names: Iterable[str], ops: Any = torch.ops.fp8serve) -> None:
    """The part of `switch_off` for kernels with a switch, on the GPU on which `here` lies. `ops`: as `candidates`."""
    off = {_GEMM_NAMES[name] for name in names if name in _GEMM_NAMES}
    off |= set(filter(None, ops.gemm_kernels(here, "").split("+")))
    if off:
        ops.gemm_kernels(here, "+".join(sorted(off)))


def _switch_off_on_cpu(names: set[str]) -> None:
    running = {cap: variants(cap) for cap in CAPS}
    ladder = {op: {f"{op}.{running[cap][op]}" for cap in CAPS} for op in running["best"]}
    lost = {op for op, every in ladder.items() if every <= names}
    for op in lost:
        replace_by_default(op, "cpu")
    left = names - {name for op in lost for name in ladder[op]}
    best = next(cap for cap in CAPS if not left & {f"{op}.{variant}" for op, variant in running[cap].items()})
    variants(best)
