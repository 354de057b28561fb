"""The kernels that the self-check runs, their test cases, and how a bad kernel is switched off.

Every op of a library is a candidate, named like the op. If an op has several kernels, each is a candidate:

    scaled_mm.mma, scaled_mm.large, ...     the GEMM kernels on a GPU
    grouped_mm.cutlass                      CUTLASS's kernel for experts; "grouped_mm" is the kernel without CUTLASS
    paged_attention.mma, .wgmma             the kernels for tensor cores; "paged_attention" is the FP32 kernel
    scaled_mm.overlap, ...                  the op after a kernel that writes its input, on GPUs where the launches of
                                            two kernels can overlap
    stored_gated_mm.gated                   the skinny kernel that casts the product of gate and up
    stored_mm.early_weights                 like scaled_mm.overlap, and the second kernel reads its weight while the
                                            first still runs
    quantize.avx2                           the variant of an op for CPUs whose best feature is AVX2

Kernels on which other kernels depend come first, so that a fault is reported for the kernel that has it.

A bad kernel is switched off for the whole process, and another takes its place. On a GPU the next kernel in the order
of GEMM or attention kernels (csrc/cuda/gemm.cu, attention_tensor.cu) replaces it; any other op runs its default kernel;
overlapping launches run one after the other. On a CPU all ops use the best set of features with which no bad variant
runs; an op whose variants are all bad runs its default kernel.
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
from fp8serve.fp8.ops.registry import OPS, Case, cases, compiled_for, use_default_kernel

MAX_CASES = 30  # of a kernel
CPU_FEATURE_CAPS = ("best", "avx512+avx512vbmi", "avx512", "avx2", "portable")  # best first
TILES = ("large", "medium", "small", "thin128", "thin64", "thin32")
GEMMS = ("skinny", "tall", "mma", *TILES, "cublaslt", "cublaslt_rows")
ATTENTION = ("attention_mma", "attention_wgmma")  # kernels for tensor cores; each replaces the next if that is bad
UNSUPPORTED_CASE = "which does not multiply this here"  # the message of a kernel that does not support a problem

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SHAPES = [(1, 16, 16), (5, 40, 400), (17, 136, 272), (64, 128, 128), (129, 264, 400), (300, 512, 640)]
_KINDS = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("1x128", "128x128"), ("1x128", "1x128")]


@dataclass(frozen=True)
class Candidate:
    """A kernel of an op.

    `run` takes the op's arguments. It raises RuntimeError with UNSUPPORTED_CASE in its message for a case that the
    kernel does not support; such a case is skipped.
    """

    name: str
    op: str
    run: Callable[..., Any]
    cases: Sequence[Case]


def sample_cases(all_cases: Sequence[Case]) -> list[Case]:
    """Returns at most MAX_CASES cases, evenly spaced."""
    return list(all_cases[:: -(-len(all_cases) // MAX_CASES)]) if all_cases else []


def candidates(device: str, ops: Any = torch.ops.fp8serve) -> Iterator[Candidate]:
    """Yields the kernels of a device, "cpu" or "cuda:0". `ops` is another namespace of ops for an emulated GPU."""
    return _cpu_candidates() if device == "cpu" else gpu_candidates(ops)


# --- CPU ------------------------------------------------------------------------------------------------------------


def _cpu_candidates() -> Iterator[Candidate]:
    names: set[str] = set()
    for cap in CPU_FEATURE_CAPS:
        for op, variant in cap_cpu_features(cap).items():
            name = f"{op}.{variant}"
            if name not in names:
                names.add(name)
                yield Candidate(name, op, partial(_run_capped, cap, op), sample_cases(cases(op)))


def cap_cpu_features(cap: str) -> dict[str, str]:
    """Limits the CPU features that kernels of this process use. Returns the variant that now runs for each op."""
    torch.ops.fp8serve.cpu_isa(cap)
    return {op: kernel["variant"] for op, kernel in cpu_kernels().items() if op in OPS}


def _run_capped(cap: str, op: str, *arguments: Any) -> Any:
    torch.ops.fp8serve.cpu_isa(cap)
    return getattr(torch.ops.fp8serve, op)(*arguments)


# --- GPU ------------------------------------------------------------------------------------------------------------


def gpu_candidates(ops: Any) -> Iterator[Candidate]:
    for name in GEMMS:
        yield Candidate(f"scaled_mm.{name}", "scaled_mm", partial(_run_gemm, ops, name), _gemm_cases(name))
    for op in ("grouped_mm", "grouped_wgrad"):
        run = partial(_run_grouped, ops, op, False)
        yield Candidate(op, op, run, [*sample_cases(gpu_cases(op)), *_large_cases[op]()])
    for op in sorted(compiled_for("cuda") & set(OPS)):
        if not op.startswith(("grouped_mm", "grouped_wgrad")):
            op_cases = [*sample_cases(gpu_cases(op)), *_large_cases.get(op, list)()]
            run = partial(_run_attention, ops, 0) if op == "paged_attention" else getattr(ops, op)
            yield Candidate(op, op, run, op_cases)
    bf16_cases = [case for case in gpu_cases("paged_attention") if "bfloat16" in case.name]
    mma_cases = [*bf16_cases, *_prompt_cases()[::2]]
    yield Candidate("paged_attention.mma", "paged_attention", partial(_run_attention, ops, 1), mma_cases)
    yield Candidate("paged_attention.wgmma", "paged_attention", partial(_run_attention, ops, 2), _prompt_cases())
    for op in ("grouped_mm", "grouped_wgrad"):
        yield Candidate(f"{op}.cutlass", op, partial(_run_grouped, ops, op, True), _large_cases[op]())
    run = partial(_run_overlapping, ops, {"overlap"}, partial(_quantize_and_multiply, ops.scaled_mm))
    yield Candidate("scaled_mm.overlap", "scaled_mm", run, _gemm_cases("skinny"))
    run = partial(_run_overlapping, ops, {"overlap"}, _write_cache_and_attend)
    attention_cases = [*_prompt_cases()[:4], *sample_cases(gpu_cases("paged_attention"))]
    yield Candidate("paged_attention.overlap", "paged_attention", run, attention_cases)
    run = partial(_run_with, ops, {"gated"}, ops.stored_gated_mm)
    yield Candidate("stored_gated_mm.gated", "stored_gated_mm", run, sample_cases(gpu_cases("stored_gated_mm")))
    enabled = {"overlap", "early_weights"}
    run = partial(_run_overlapping, ops, enabled, partial(_quantize_and_multiply, ops.stored_mm))
    yield Candidate("stored_mm.early_weights", "stored_mm", run, sample_cases(gpu_cases("stored_mm")))


def gpu_cases(op: str) -> list[Case]:
    """Returns the cases of an op that a GPU supports: of grouped_mm not packed weights, BF16 inputs and MX blocks."""
    cpu_only = ("bfloat16 packed", "packed True", ", mx,") if op == "grouped_mm" else ()
    return [case for case in cases(op) if not any(words in case.name for words in cpu_only)]


def _run_gemm(ops: Any, name: str, *arguments: Any) -> Tensor:
    """Runs scaled_mm by the kernel of this name. BF16 outputs test tiles that are computed in groups of four rows."""
    rows_together = 1 if arguments[-1] == torch.float32 else 4
    output: Tensor = ops.scaled_mm_by(*arguments, name.removesuffix("_rows"), rows_together)
    return output


def _gemm_cases(name: str) -> list[Case]:
    """Returns cases in an order in which any thirty cover every shape, kind of scale, format and output dtype."""
    kinds = {"cublaslt": _KINDS[:1], "cublaslt_rows": _KINDS[1:3]}.get(name, _KINDS)
    formats = [(_E4M3, _E4M3), (_E5M2, _E4M3), (_E4M3, _E5M2)]
    grid = list(product(_SHAPES, kinds, formats, (torch.bfloat16, torch.float32)))
    order = sorted(range(len(grid)), key=lambda i: i * 7 % len(grid))
    return [
        Case(f"{s} {f[0]} {f[1]} {k} {out}", partial(mm_case, *s, *f, k, out))
        for s, k, f, out in (grid[i] for i in order)
    ]


def _disabled_kernels(ops: Any, tensor: Tensor) -> set[str]:
    return set(ops.gemm_kernels(tensor, "").split("+")) - {""}


def _disable_kernels(ops: Any, tensor: Tensor, names: set[str]) -> None:
    """Switches off these kernels on the tensor's GPU, and all others on."""
    ops.gemm_kernels(tensor, "+".join(sorted(names)) or "none")


def _run_grouped(ops: Any, op: str, uses_cutlass: bool, *arguments: Any) -> Tensor:
    disabled = _disabled_kernels(ops, arguments[0]) - {"grouped_cutlass"}
    _disable_kernels(ops, arguments[0], disabled if uses_cutlass else disabled | {"grouped_cutlass"})
    output: Tensor = getattr(ops, op)(*arguments)
    return output


def _run_attention(ops: Any, num_kernels: int, q: Tensor, *arguments: Any) -> Tensor:
    """Runs attention with the first `num_kernels` of the kernels in ATTENTION switched on and the others off."""
    if num_kernels == 2 and q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        raise RuntimeError(UNSUPPORTED_CASE)
    disabled = _disabled_kernels(ops, q)
    _disable_kernels(ops, q, disabled - set(ATTENTION[:num_kernels]) | set(ATTENTION[num_kernels:]))
    try:
        output: Tensor = ops.paged_attention(q, *arguments)
    finally:
        _disable_kernels(ops, q, disabled)
    return output


def _prompt_cases() -> list[Case]:
    """Returns cases with long prompts next to short sequences, for every cache dtype, head size and option."""
    sinks = torch.tensor([0.5, -4.0, 3.0, 0.0])
    lengths = [(1, 1), (330, 140), (20, 3), (100, 100)]
    caches = (torch.bfloat16, _E4M3, _E5M2)
    grid = product(caches, (64, 80, 128), ((), (100, 2.0, sinks), (33,), (None, 0.5)))
    selected = [grid_case for i, grid_case in enumerate(grid) if i % 5 != 4]
    return [
        Case(f"prompts {cache} {dim} {options}", partial(prompt_case, cache, 4, 2, dim, lengths, *options))
        for cache, dim, options in selected
    ]


def _run_overlapping(ops: Any, enabled: set[str], run: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Runs two kernels with these switches on, so that the second may start before the first has ended."""
    first = arguments[0]
    if first.is_cuda and torch.cuda.get_device_capability(first.device) < (9, 0):
        raise RuntimeError(UNSUPPORTED_CASE)
    return _run_with(ops, enabled, partial(run, ops), *arguments)


def _run_with(ops: Any, enabled: set[str], run: Callable[..., Tensor], *arguments: Any) -> Tensor:
    disabled = _disabled_kernels(ops, arguments[0])
    _disable_kernels(ops, arguments[0], disabled - enabled)
    try:
        return run(*arguments)
    finally:
        _disable_kernels(ops, arguments[0], disabled)


def _quantize_and_multiply(multiply: Callable[..., Tensor], ops: Any, a: Tensor, *arguments: Any) -> Tensor:
    """Quantizes FP8 values with scale 1, which does not change them, and multiplies them."""
    q, _ = ops.quantize(a.float(), torch.ones((), device=a.device), a.dtype)
    return multiply(q, *arguments)


def _write_cache_and_attend(ops: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    if k.itemsize == 1:
        raise RuntimeError(UNSUPPORTED_CASE)
    slots = torch.arange(k.shape[0] * k.shape[1], device=k.device)
    keys, values = torch.zeros_like(k), torch.zeros_like(v)
    ops.write_kv(k.flatten(0, 1), v.flatten(0, 1), keys, values, slots, None, None)
    output: Tensor = ops.paged_attention(q, keys, values, *arguments)
    return output


def _fp8_output_cases() -> list[Case]:
    """Returns cases of sizes that CUTLASS supports, with FP8 output."""

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


_large_cases: dict[str, Callable[[], list[Case]]] = {  # with sizes that CUTLASS supports
    "scaled_mm_quantize": _fp8_output_cases,
    "grouped_mm": partial(_expert_cases, _many_rows, ("expert", "row", "block")),
    "grouped_wgrad": partial(_expert_cases, _many_columns, ("expert", "row", "block")),
}


# The names by which the op `gemm_kernels` switches the candidates off.
_SWITCHES = {f"scaled_mm.{name}": name for name in GEMMS}
_SWITCHES |= dict.fromkeys(("grouped_mm.cutlass", "grouped_wgrad.cutlass"), "grouped_cutlass")
_SWITCHES |= {f"paged_{name.replace('_', '.')}": name for name in ATTENTION}
OVERLAP = ("scaled_mm.overlap", "paged_attention.overlap")
_SWITCHES |= dict.fromkeys(OVERLAP, "overlap")
_SWITCHES["stored_mm.early_weights"] = "early_weights"
_SWITCHES["stored_gated_mm.gated"] = "gated"
SEPARATE = (*OVERLAP, "stored_mm.early_weights", "stored_gated_mm.gated")
"""Candidates that test a switch alone: while other candidates run, these switches are off."""


def switch_off(device: torch.device, names: Iterable[str]) -> None:
    """Switches off the kernels with these candidate names in this process. Unknown names are ignored."""
    if device.type == "cpu":
        _switch_off_on_cpu(set(names))
        return
    switch_off_by_name(torch.empty(1, device=device), names)
    for name in names:
        if name in OPS:
            use_default_kernel(name, "cuda")


def switch_off_by_name(tensor: Tensor, names: Iterable[str], ops: Any = torch.ops.fp8serve) -> None:
    """Switches off, on the tensor's GPU, those of the kernels that the op `gemm_kernels` can switch off."""
    disabled = {_SWITCHES[name] for name in names if name in _SWITCHES} | _disabled_kernels(ops, tensor)
    if disabled:
        _disable_kernels(ops, tensor, disabled)


def _switch_off_on_cpu(names: set[str]) -> None:
    variants = {cap: cap_cpu_features(cap) for cap in CPU_FEATURE_CAPS}
    op_candidates = {op: {f"{op}.{variants[cap][op]}" for cap in CPU_FEATURE_CAPS} for op in variants["best"]}
    bad_ops = {op for op, op_names in op_candidates.items() if op_names <= names}
    for op in bad_ops:
        use_default_kernel(op, "cpu")
    avoided = names - {name for op in bad_ops for name in op_candidates[op]}
    cap_names = {cap: {f"{op}.{variant}" for op, variant in variants[cap].items()} for cap in CPU_FEATURE_CAPS}
    cap_cpu_features(next(cap for cap in CPU_FEATURE_CAPS if not avoided & cap_names[cap]))
