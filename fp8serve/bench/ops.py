"""The benchmark `bench ops`: measures every op and compares it with the same computation in torch and BF16.

The sizes are those of a Llama model with 1.1 billion parameters, and of the linear layers on which FP8 kernels are
often compared. Each function in `MAKERS` yields the cases of one group of ops, and frees its tensors before the next
one runs.

A case states the minimum work of an op: the bytes of its inputs and outputs, and two FLOPs for each multiplication and
addition. Together with the time they give GB/s and GFLOP/s. Each of the two is divided by this machine's measured peak;
`share_of_peak` is the larger of the two fractions (the roofline). The peaks are the rate of reading a tensor much
larger than the caches, and the rate of torch's matrix product. So an op that works from the caches, or is faster than
torch, can exceed 1.
"""

import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.bench.figures import Call, fastest
from fp8serve.doctor import instruction_sets
from fp8serve.engine.packing import huge_pages
from fp8serve.fp8 import ops
from fp8serve.fp8.ops import OPS as REGISTERED
from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.ops.arithmetic import E8M0
from fp8serve.fp8.ops.elementwise import rms_norm, silu_mul
from fp8serve.fp8.ops.four_bit import packed_shapes, random_4bit
from fp8serve.fp8.ops.packing import pack_into, packed_shape

OPS = torch.ops.fp8serve
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 2048, 5632, 32000, 32, 4, 64
LINEAR = {  # rows, out, in -> goal: speed-up over torch's BF16
    (1, 4096, 4096): 4.0,
    (1, 14336, 4096): 3.0,
    (8, 4096, 4096): 2.0,
    (8, 14336, 4096): 2.0,
    (64, 4096, 4096): None,
    (512, 4096, 4096): 1.0,
    (512, 14336, 4096): 1.0,
}
LAYERS = ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632))  # out, in: q, k and v; o; gate and up; down
MEMORY_BOUND_ROWS = 8  # up to this number, a product takes as long as reading its weight from memory
NUM_WEIGHTS = 4  # that take turns, so that caches cannot hold them all
BLOCK = 16  # tokens in a block of the paged KV cache


@dataclass(frozen=True)
class BenchCase:
    """One op at one size. `torch_bf16` computes the same in BF16; it is None if torch has no such op. `goal` is the
    intended speed-up over torch, if there is one."""

    op: str
    size: str
    call: Call
    torch_bf16: Call | None
    num_bytes: float
    flops: float = 0.0
    goal: float | None = None


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def _fp8(*shape: int) -> Tensor:
    return _noise(*shape).to(E4M3)


def _take_turns(calls: list[Call]) -> Call:
    turns = cycle(calls)
    return lambda: next(turns)()


def casts() -> Iterator[BenchCase]:
    """Casts of a 4096 x 4096 matrix. Torch computes the amax, scales and casts. The goal refers to a case in which
    torch does not scale."""
    x, scale = _noise(4096, 4096), torch.tensor(1.5)
    size, num_bytes = "4096 x 4096", 3.0 * x.numel()

    def torch_cast() -> tuple[Tensor, Tensor]:
        return x.abs().amax(), (x * 1.5).to(E4M3)

    yield BenchCase("quantize", size, partial(OPS.quantize, x, scale, E4M3), torch_cast, num_bytes)
    call = partial(OPS.quantize, x, scale, E4M3)
    unscaled = f"{size}, torch: no scale"
    yield BenchCase("quantize", unscaled, call, lambda: (x.abs().amax(), x.to(E4M3)), num_bytes, goal=10.0)
    yield BenchCase("quantize_current", size, partial(OPS.quantize_current, x, E4M3, False), torch_cast, num_bytes)
    yield BenchCase("quantize_rowwise", size, partial(OPS.quantize_rowwise, x, E4M3, False), torch_cast, num_bytes)
    for rows in (1, 128):
        call = partial(OPS.quantize_block, x, E4M3, rows, False)
        yield BenchCase("quantize_block", f"{size}, {rows} x 128", call, torch_cast, num_bytes)
    call = partial(OPS.quantize_transpose, x, scale, E4M3)
    transposed_bytes = num_bytes + x.numel()
    yield BenchCase("quantize_transpose", size, call, lambda: torch_cast()[1].t().contiguous(), transposed_bytes)
    q, amax, saturated = x.to(E4M3), torch.zeros(()), torch.zeros((), dtype=torch.int64)
    call = partial(OPS.transpose_fp8, q)
    yield BenchCase("transpose_fp8", size, call, lambda: q.t().contiguous(), 2.0 * q.numel())
    for description, factor in (("nothing saturated", 1.0), ("some saturated", 1000.0)):
        call = partial(OPS.quantize_watched, x, None, None, torch.tensor(factor), amax, saturated, None)
        second_pass = 2.0 * x.numel() if factor > 1 else 0.0  # which counts saturated elements
        yield BenchCase("quantize_watched", f"{size}, {description}", call, torch_cast, num_bytes + second_pass)


def _fp8_linear(x: Tensor, scale: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor]) -> object:
    return OPS.scaled_mm(OPS.quantize(x, scale, E4M3)[0], weight, *scales, None, BF16)


def _packed_linear(x: Tensor, scale: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor]) -> object:
    return OPS.packed_mm(OPS.quantize(x, scale, E4M3)[0], weight, *scales, None, None, BF16)


def linears() -> Iterator[BenchCase]:
    """Linear layers with BF16 input and output, whose input is quantized. Torch computes them in BF16.

    Linear layers are usually compared with one weight, which caches may hold; the goals refer to this case. With few
    rows, several weights also take turns, as in a decoder. Then weights are read from memory, and FP8 can be twice as
    fast at most, because its weights are half as large.
    """
    for (m, n, k), goal in LINEAR.items():
        size = f"{m} x {n} x {k}"
        yield from _linear(m, n, k, 1, size, goal)
        if m <= MEMORY_BOUND_ROWS:
            yield from _linear(m, n, k, NUM_WEIGHTS, f"{size}, {NUM_WEIGHTS} in turn", None)


def _linear(m: int, n: int, k: int, count: int, size: str, goal: float | None) -> Iterator[BenchCase]:
    """Yields a linear layer with weights in a checkpoint's layout, and with packed weights."""
    x, scale = _noise(m, k), torch.tensor(64.0)
    weights = [_noise(n, k) for _ in range(count)]
    quantized = [OPS.quantize_current(w, E4M3, False) for w in weights]
    inverse, torch_call = scale.reciprocal(), _take_turns([partial(F.linear, x, w) for w in weights])
    rest = torch_call, n * k + 2.0 * m * (n + k), 2.0 * m * n * k, goal
    call = _take_turns([partial(_fp8_linear, x, scale, q, (inverse, s)) for q, s in quantized])
    yield BenchCase("quantize + scaled_mm", size, call, *rest)
    packed = [(pack_into(q, huge_pages(q.nbytes).view(E4M3)), s) for q, s in quantized]
    call = _take_turns([partial(_packed_linear, x, scale, q, (inverse, s)) for q, s in packed])
    yield BenchCase("quantize + packed_mm", size, call, *rest)


def weight_only() -> Iterator[BenchCase]:
    """Products of BF16 inputs with packed weights in FP8, NVFP4 and MXFP4, of the linear layers of a Llama model with
    1.1 billion parameters. Weights take turns, so that they are read from memory. Torch computes in BF16."""
    one = torch.ones(())
    for (n, k), m in product(LAYERS, (1, 8, 256)):
        x, size, flops = _noise(m, k), f"{m} x {n} x {k}", 2.0 * m * n * k
        weights = [_noise(n, k) for _ in range(NUM_WEIGHTS)]
        torch_call = _take_turns([partial(F.linear, x, w) for w in weights])
        packed = [pack_into(w.to(E4M3), huge_pages(w.numel()).view(E4M3)) for w in weights]
        call = _take_turns([partial(OPS.packed_mm, x, w, one, one, None, None, BF16) for w in packed])
        yield BenchCase("packed_mm", f"{size}, FP8", call, torch_call, n * k + 2.0 * m * (n + k), flops)
        for name, dtype, bits in (("NVFP4", E4M3, 4.5), ("MXFP4", E8M0, 4.25)):
            global_scale = one if dtype == E4M3 else None
            weights_4bit = [_packed_4bit(n, k, dtype, seed) for seed in range(NUM_WEIGHTS)]
            call = _take_turns([partial(OPS.mm_4bit, x, *w, global_scale, None) for w in weights_4bit])
            yield BenchCase("mm_4bit", f"{size}, {name}", call, torch_call, n * k * bits / 8 + 2.0 * m * (n + k), flops)


def _packed_4bit(n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Returns a random weight in 4 bits, packed into huge pages."""
    codes, scales = random_4bit(n, k, dtype, seed)
    shapes = packed_shapes(codes, scales)
    out_codes, out_scales = (huge_pages(math.prod(shape)).view(shape) for shape in shapes)
    OPS.pack_4bit(codes, scales, out_codes, out_scales.view(dtype))
    return out_codes, out_scales.view(dtype)


def packing() -> Iterator[BenchCase]:
    """Packing of a weight for packed_mm. Torch copies the weight."""
    weight = _noise(4096, 4096).to(E4M3)
    out = huge_pages(weight.nbytes).view(E4M3).view(packed_shape(*weight.shape))
    copy = partial(torch.Tensor.copy_, torch.empty_like(weight), weight)
    yield BenchCase("pack_weight", "4096 x 4096", partial(OPS.pack_weight, weight, out), copy, 2.0 * weight.nbytes)


def products() -> Iterator[BenchCase]:
    """Matrix products of FP8 operands: with the scales of each recipe, with a residual added, and with the result cast
    to FP8. Torch computes a BF16 linear layer."""
    n = k = 4096
    one, x_all, w = torch.ones(()), _noise(512, k), _noise(n, k)
    w_q = w.to(E4M3)
    for m in (1, 8, 512):
        x, residual = x_all[:m], _noise(m, n)
        q, size = x.to(E4M3), f"{m} x {n} x {k}"
        num_bytes, flops = n * k + m * k + 2.0 * m * n, 2.0 * m * n * k
        blocks = torch.ones(m, k // 128), torch.ones(n // 128, k // 128)
        scales = {"per tensor": (one, one), "per row": (torch.ones(m, 1), torch.ones(n, 1)), "blocks": blocks}
        for name, pair in scales.items():
            call = partial(OPS.scaled_mm, q, w_q, *pair, None, BF16)
            yield BenchCase("scaled_mm", f"{size}, {name}", call, partial(F.linear, x, w), num_bytes, flops)
        call, torch_add = partial(OPS.scaled_mm_add, q, w_q, one, one, None, residual), partial(torch.addmm, residual)
        yield BenchCase("scaled_mm_add", size, call, partial(torch_add, x, w.t()), num_bytes + 2 * m * n, flops)
        call = partial(OPS.scaled_mm_quantize, q, w_q, one, one, None, one, E4M3)
        torch_call = partial(_then_cast, F.linear, one, x, w)
        yield BenchCase("scaled_mm_quantize", size, call, torch_call, num_bytes - m * n, flops)


def heads() -> Iterator[BenchCase]:
    """`lm_head` in BF16, with independent rows. Torch computes a BF16 linear layer."""
    w = _noise(VOCAB, HIDDEN)
    for m in (1, 8):
        x = _noise(m, HIDDEN)
        call, torch_call = partial(OPS.mm, x, w, None, BF16), partial(F.linear, x, w)
        yield BenchCase("mm", f"{m} x {VOCAB} x {HIDDEN}", call, torch_call, 2.0 * w.numel(), 2.0 * m * w.numel())


def _then_cast(compute: Callable[..., Tensor], scale: Tensor, *args: Any) -> object:
    return (compute(*args) * scale).to(E4M3)


def norms_and_activations() -> Iterator[BenchCase]:
    """Norms and activations, alone and with a cast of their result, and their gradients. Torch computes the same with
    several ops."""
    scale = torch.tensor(8.0)
    for m in (1, 512):
        x, weight, size = _noise(m, HIDDEN), _noise(HIDDEN), f"{m} x {HIDDEN}"
        norm, num_bytes = (x, weight, 1e-5), 2.0 * x.numel()
        torch_call, torch_cast = partial(rms_norm, *norm), partial(_then_cast, rms_norm, scale, *norm)
        yield BenchCase("rms_norm", size, partial(OPS.rms_norm, *norm), torch_call, 2 * num_bytes)
        call = partial(OPS.rms_norm_quantize, *norm, scale, E4M3)
        yield BenchCase("rms_norm_quantize", size, call, torch_cast, 1.5 * num_bytes)
        call = partial(OPS.layer_norm_quantize, x, weight, None, 1e-5, scale, E4M3)
        torch_cast = partial(_then_cast, partial(F.layer_norm, x, (HIDDEN,), weight), scale)
        yield BenchCase("layer_norm_quantize", size, call, torch_cast, 1.5 * num_bytes)
        call, torch_call = partial(OPS.rms_norm_backward, x, *norm), partial(reference.rms_norm_backward, x, *norm)
        yield BenchCase("rms_norm_backward", size, call, torch_call, 3 * num_bytes)
        gated, size = (_noise(m, INTERMEDIATE), _noise(m, INTERMEDIATE)), f"{m} x {INTERMEDIATE}"
        num_bytes = 2.0 * gated[0].numel()
        torch_call, torch_cast = partial(silu_mul, *gated), partial(_then_cast, silu_mul, scale, *gated)
        yield BenchCase("silu_mul", size, partial(OPS.silu_mul, *gated), torch_call, 3 * num_bytes)
        call = partial(OPS.silu_mul_quantize, *gated, scale, E4M3)
        yield BenchCase("silu_mul_quantize", size, call, torch_cast, 2.5 * num_bytes)
        call = partial(OPS.silu_mul_backward, gated[0], *gated)
        torch_call = partial(reference.silu_mul_backward, gated[0], *gated)
        yield BenchCase("silu_mul_backward", size, call, torch_call, 5 * num_bytes)


def _rotary_inputs(tokens: int) -> tuple[Tensor, ...]:
    """Returns q, k and v as views of one projection's output, then cos and sin."""
    qkv = _noise(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM).view(tokens, -1, HEAD_DIM)
    angle = torch.rand(tokens, 1, HEAD_DIM // 2).repeat(1, 1, 2)
    return *qkv.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1), angle.cos().to(BF16), angle.sin().to(BF16)


def positions() -> Iterator[BenchCase]:
    """Rotary embedding and the write to the KV cache. Torch computes the same with several ops."""
    for tokens in (1, 512):
        q, k, v, cos, sin = _rotary_inputs(tokens)
        caches = [torch.zeros(64, BLOCK, KV_HEADS, HEAD_DIM, dtype=BF16) for _ in range(2)]
        slots, size = torch.randperm(1024)[:tokens], f"{tokens} tokens"
        q_bytes, kv_bytes = 4.0 * q.numel(), 4.0 * (k.numel() + v.numel())
        torch_call = partial(reference.rotary, q, cos, sin)
        yield BenchCase("rotary", size, partial(OPS.rotary, q, cos, sin), torch_call, q_bytes)
        args: tuple[Any, ...] = (q, k, v, cos, sin, *caches, slots, None, None)
        call, torch_call = partial(OPS.rotary_write_kv, *args), partial(reference.rotary_write_kv, *args)
        yield BenchCase("rotary_write_kv", size, call, torch_call, q_bytes + kv_bytes)
        call = partial(OPS.write_kv, k, v, *caches, slots, None, None)
        yield BenchCase("write_kv", size, call, partial(_torch_write, (k, v), caches, slots), kv_bytes)


def _torch_write(values: tuple[Tensor, Tensor], caches: list[Tensor], slots: Tensor) -> None:
    for x, cache in zip(values, caches, strict=True):
        cache.view(-1, *x.shape[1:])[slots] = x


def attention() -> Iterator[BenchCase]:
    """Attention of the last tokens of a context over a paged KV cache. Torch runs scaled_dot_product_attention over a
    contiguous cache."""
    for cache, name in ((BF16, "BF16"), (E4M3, "E4M3")):
        for tokens, context in ((1, 1024), (256, 256), (1024, 1024)):
            blocks, scale = context // BLOCK, torch.ones(()) if cache == E4M3 else None
            k, v = (_noise(blocks, BLOCK, KV_HEADS, HEAD_DIM).to(cache) for _ in range(2))
            q, block_tables = _noise(tokens, HEADS, HEAD_DIM), torch.randperm(blocks).int().unsqueeze(0)
            queries = block_tables, torch.tensor([context]).int(), torch.tensor([0, tokens]).int()
            call = partial(OPS.paged_attention, q, k, v, *queries, scale, scale, HEAD_DIM**-0.5)
            keys, values = (t.to(BF16).view(1, context, KV_HEADS, HEAD_DIM).transpose(1, 2) for t in (k, v))
            attend = partial(F.scaled_dot_product_attention, is_causal=tokens > 1, enable_gqa=True)
            torch_call = partial(attend, q[None].transpose(1, 2), keys, values)
            flops = 4.0 * HEADS * HEAD_DIM * tokens * (context - (tokens - 1) / 2)
            size, num_bytes = f"{tokens} over {context}, {name} cache", float(2 * k.nbytes + 2 * q.nbytes)
            yield BenchCase("paged_attention", size, call, torch_call, num_bytes, flops)


def sampling() -> Iterator[BenchCase]:
    """Sampling of a token for each of 8 rows, without and with all filters. Torch runs the reference, which sorts."""
    rows = 8
    for vocab in (VOCAB, 4 * VOCAB):
        logits, one = 3 * torch.randn(rows, vocab), torch.ones(rows, dtype=torch.float64)
        plain = logits, 0.8 * one, 0 * one.long(), one, 0 * one, 0.5 * one
        filters = logits, 0.8 * one, 50 * one.long(), 0.9 * one, 0.02 * one, 0.5 * one
        for name, args in {"temperature": plain, "top_k, top_p, min_p": filters}.items():
            call, sorting = partial(OPS.sample, *args), partial(reference.sample, *args)
            yield BenchCase("sample", f"{rows} x {vocab}, {name}", call, sorting, 4.0 * logits.numel())


def updates() -> Iterator[BenchCase]:
    """The update of the scales of 400 tensors with amax histories of 1024, once in a training step. Torch has no such
    op."""
    count, length = 400, 1024
    states = [torch.ones(()) for _ in range(count)], [torch.rand(length) for _ in range(count)]
    counters = [[torch.zeros((), dtype=torch.int64) for _ in range(count)] for _ in range(2)]
    call = partial(OPS.delayed_update, *states, *counters, [448.0] * count, 0, 1, "max")
    yield BenchCase("delayed_update", f"{count} histories of {length}", call, None, 8.0 * count * length)


def _num_bytes(values: Any) -> int:
    """Returns the bytes of all tensors in nested arguments or results of an op."""
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(map(_num_bytes, values)) if isinstance(values, tuple | list) else 0


def others(measured: Set[str]) -> Iterator[BenchCase]:
    """Every op that is not in `measured`, at the largest of its test cases, without a comparison with torch."""
    for name in REGISTERED:
        if name not in measured:
            case = max(cases(name), key=lambda case: _num_bytes(case.make()))
            args, op = case.make(), getattr(OPS, name)
            yield BenchCase(name, case.name, partial(op, *args), None, float(_num_bytes(args) + _num_bytes(op(*args))))


MAKERS = (
    casts,
    linears,
    weight_only,
    products,
    packing,
    heads,
    norms_and_activations,
    positions,
    attention,
    sampling,
    updates,
)


@dataclass(frozen=True)
class Peaks:
    """The measured peaks of this machine."""

    bytes_per_second: float
    flops_per_second: float


def measure_peaks(seconds: float) -> Peaks:
    """Measures the rate of reading 512 MB, and of torch's product of 2048 x 2048 matrices. The matrices are BF16, or
    FP32 on a CPU without BF16 instructions."""
    dtype = torch.bfloat16 if {*instruction_sets()} & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32
    large, square = torch.ones(2**27), torch.randn(2048, 2048).to(dtype)
    result = fastest({"read": large.sum, "product": lambda: square @ square}, seconds)
    return Peaks(large.nbytes / result["read"], 2 * 2048**3 / result["product"])


def measure(
    seconds: float, report: Callable[[str, int, int], None], only: str | None = None, goals: bool = False
) -> dict[str, Any]:
    """Measures every case for about `seconds`. `only` selects ops whose name contains it, and `goals` selects cases
    that have a goal."""
    first_peaks, rows = measure_peaks(max(seconds, 0.5)), []
    measured: set[str] = set()
    makers = {maker.__name__: maker for maker in MAKERS} | {"others": partial(others, measured)}
    for index, (name, maker) in enumerate(makers.items()):
        report(name, index, len(makers))
        for case in maker():
            measured.update(case.op.split(" + "))
            if (only is None or only in case.op) and (case.goal is not None or not goals):
                rows.append(_figures(case, seconds))
    last_peaks = measure_peaks(max(seconds, 0.5))  # measured twice, because the machine may have been busy once
    peaks = Peaks(
        max(first_peaks.bytes_per_second, last_peaks.bytes_per_second),
        max(first_peaks.flops_per_second, last_peaks.flops_per_second),
    )
    for row in rows:
        bandwidth_share = 1e9 * row["gb_per_s"] / peaks.bytes_per_second
        row["share_of_peak"] = max(bandwidth_share, 1e9 * row["gflop_per_s"] / peaks.flops_per_second)
    return {
        "peaks": {"gb_per_s": peaks.bytes_per_second / 1e9, "gflop_per_s": peaks.flops_per_second / 1e9},
        "backends": ops.backends(),
        "ops": rows,
    }


def _figures(case: BenchCase, seconds: float) -> dict[str, Any]:
    candidates = {"op": case.call} | ({"torch": case.torch_bf16} if case.torch_bf16 else {})
    result = fastest(candidates, seconds)
    op_seconds, torch_seconds = result["op"], result.get("torch")
    speed_up = None if torch_seconds is None else torch_seconds / op_seconds
    return {
        "op": case.op,
        "size": case.size,
        "us": 1e6 * op_seconds,
        "gb_per_s": case.num_bytes / op_seconds / 1e9,
        "gflop_per_s": case.flops / op_seconds / 1e9,
        "torch_bf16_us": None if torch_seconds is None else 1e6 * torch_seconds,
        "times_torch_bf16": speed_up,
        "goal": case.goal,
        "reached": None if speed_up is None or case.goal is None else speed_up >= case.goal,
    }
