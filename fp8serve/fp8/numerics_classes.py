"""The table of numerics classes: for every operation, format and processor, which kernels give the same bits.

A row is an operation on one format, with the ops that compute it. A column is a level of the CPU library, a chip, a
GPU in the invariant mode, or the reference. A cell is the name of a numerics class. Cells of a row with the same class
promise the same bits for every input, unless the class holds on one machine.

`make numerics` writes docs/numerics-classes.md from this table, `fp8serve doctor` prints the column of the machine, and
tests/csrc/test_numerics.py compares the bits of all levels of the machine by it. tests/arm compares those of ARM.
"""

from collections.abc import Iterator
from dataclasses import dataclass

LEVELS = ("portable", "avx2", "avx512", "avx512bf16", "neon", "neonfhm", "neonbf16")
CHIPS = ("sm_89", "sm_90a", "sm_100f", "sm_120f")
AMX = "amx"
"""The level that no process runs unless `cpu_isa` names it, because no machine with AMX has measured it."""
INVARIANT, REFERENCE = "invariant", "reference"
FTZ = "_ftz"
"""The end of the names of classes that are as another class except where a value or a sum is subnormal in FP32."""


@dataclass(frozen=True)
class NumericsClass:
    """`promise` says what is exact and in which order sums are taken.

    `error` is the largest distance from the reference, as a share of the norm of a result and beside the rounding to
    its dtype. Only CPU kernels have such a class; their bits are the same on every machine. Without `error` a class
    holds on one machine, and another may give other bits.
    """

    promise: str
    error: float | None = None


_WITHOUT_SUBNORMALS = "as `{}`, and values and sums that are subnormal in FP32 count as zero"
CLASSES = {
    "exact": NumericsClass(
        "no sum, or one that no order changes: the bits of the reference, the sign of a NaN apart", 0.0
    ),
    "last_bit": NumericsClass(
        "16 running sums in FP32, added as a tree, and an exponential of our own: the reference but for the last bit",
        1e-6,
    ),
    "sums_fp64": NumericsClass(
        "sums in FP64: another token than the reference's only where the random number is within 1e-15 of a border",
        0.0,
    ),
    "four_lanes": NumericsClass(
        "exact products (of BF16 values those above 2^-126), four running FP32 sums over each 1024 of K (each 128 with "
        "block scales), joined in an order that depends on K alone (`csrc/cpu/gemm.h`): at most twice the error of a "
        "naive FP32 product",
        1e-6,
    ),
    "four_lanes_ftz": NumericsClass(_WITHOUT_SUBNORMALS.format("four_lanes"), 1e-6),
    "amx_tiles": NumericsClass(
        "exact products; of each 32 of K one FP32 sum of the even and one of the odd, which are added to each other "
        "and then to the sum of 1024 of K, or of 128 with block scales (`csrc/cpu/gemm_amx.cpp`); values and sums that "
        "are subnormal in FP32 count as zero",
        1e-6,
    ),
    "pairs_bf16": NumericsClass(
        "exact products of BF16 values, one running FP32 sum, of each pair the odd one first "
        "(`csrc/cpu/pair_product.h`); attention's weights and their gradients are rounded to BF16",
        2.0**-8,
    ),
    "pairs_bf16_ftz": NumericsClass(_WITHOUT_SUBNORMALS.format("pairs_bf16"), 2.0**-8),
    "tiles16_fp32": NumericsClass("tiles of 16 keys in parts of 512, in FP32 (`csrc/cpu/attention.h`)", 1e-5),
    "tiles64_bf16": NumericsClass(
        "tiles of 64 keys in parts of 512; weights rounded to BF16, sums in FP32 (`csrc/cpu/attention.h`)",
        2.0**-8,
    ),
    "rows_cuda": NumericsClass(
        "FP32 sums of a row in an order that its width sets (`csrc/cuda/rows.h`): the reference but for the last bit",
    ),
    "tensor_cores": NumericsClass(
        "sums of at most 128 of K in the order and precision of the tensor cores, added in FP32. The number of rows "
        "chooses the kernel, so the last bits depend on the batch",
    ),
    "tensor_cores_14bit": NumericsClass(
        "as `tensor_cores`, and within 128 of K the tensor cores keep 14 bits of a sum"
    ),
    "skinny_order": NumericsClass(
        "one order for every number of rows, in the batch, in every chunk and in training (`csrc/cuda/skinny_order.h`)",
    ),
    "segments128_bf16": NumericsClass(
        "32 keys at a time in segments of 128; weights rounded to BF16, sums in FP32 (`csrc/cuda/attention_mma.cu`)",
    ),
    "segments512_fp32": NumericsClass("segments of 512 keys, in FP32 (`csrc/cuda/attention.cu`)"),
    "sums_integer": NumericsClass(
        "weights in FP64, sums as integers, exact in any order (`csrc/cuda/sample.cu`): another token than the "
        "reference's only where the random number is within 1e-15 of a border",
    ),
    "torch": NumericsClass("PyTorch's own kernels, whose order may differ between versions and machines"),
    "torch_fp64": NumericsClass("PyTorch's own kernels in FP64, rounded once"),
    "refused": NumericsClass("the invariant mode refuses such a model"),
}


@dataclass(frozen=True, eq=False)
class Row:
    """An operation on one format. `cells` has a class for every column.

    `evidence` is the row of the table in docs/cuda.md ("What has run where") that says where its GPU kernels have run,
    or "" where a GPU runs no kernel of ours.
    """

    operation: str
    format: str
    ops: tuple[str, ...]
    cells: dict[str, str]
    evidence: str = ""


def _cells(cpu: str, gpu: str, reference: str, **exceptions: str) -> dict[str, str]:
    """Returns the cells of a row: one class on CPUs and one on GPUs, but for the columns in `exceptions`.

    A machine with AMX runs its kernels for AVX-512 BF16 where none is for AMX.
    """
    cells = dict.fromkeys((*LEVELS, AMX), cpu) | dict.fromkeys((*CHIPS, INVARIANT), gpu) | {REFERENCE: reference}
    return cells | {AMX: exceptions.get("avx512bf16", cpu)} | exceptions


_EXACT = _cells("exact", "exact", "exact")
_CASTS = "casts, delayed update, norm and SiLU with casts, rotary, KV write"
_NORMS = "norms, activations and rotary with their gradients, transposes"
_GEMM = "GEMM for every format, granularity and size, products of few rows, BF16"
_EXPERTS = "products of experts and their casts, on the project's own kernels"
_ATTENTION = "paged attention; on Hopper's warpgroups"
_SAMPLING = "sampling: temperature, top_k, top_p, min_p"

_FP8_PRODUCT = _cells(
    "four_lanes",
    "tensor_cores",
    "torch",
    amx="amx_tiles",
    sm_90a="tensor_cores_14bit",
    invariant="skinny_order",
)
_FP8_EXPERTS = _FP8_PRODUCT | {INVARIANT: "refused"}
# vdpbf16ps takes subnormal operands and sums as zero. Only BF16 values reach that range.
_BF16_PRODUCT = _cells(
    "four_lanes",
    "tensor_cores",
    "torch",
    avx512bf16="four_lanes_ftz",
    amx="amx_tiles",
    invariant="skinny_order",
)
_BF16_WITHOUT_INVARIANT = _BF16_PRODUCT | {INVARIANT: "refused"}
_MX_PRODUCT = _cells("four_lanes", "tensor_cores", "torch", amx="amx_tiles", invariant="refused")
_BF16_GRADIENT = _cells("pairs_bf16", "torch", "torch", avx512bf16="pairs_bf16_ftz")
_BF16_ATTENTION = _cells("tiles16_fp32", "segments128_bf16", "torch_fp64", avx512bf16="tiles64_bf16")

ROWS = (
    Row(
        "cast",
        "FP8, one scale for a tensor",
        ("quantize", "quantize_current", "quantize_delayed", "quantize_transpose", "grouped_quantize"),
        _EXACT,
        _CASTS,
    ),
    Row("cast", "FP8, scales by row or by block", ("quantize_rowwise", "quantize_block"), _EXACT, _CASTS),
    Row("cast", "MXFP8", ("quantize_mx",), _EXACT),
    Row("cast", "NVFP4, and the rotation before it", ("cast_nvfp4", "rotate"), _EXACT),
    Row(
        "cast of a norm or a gated activation",
        "FP8",
        (
            "rms_norm_quantize",
            "silu_mul_quantize",
            "rms_norm_quantize_rows",
            "silu_mul_quantize_rows",
            "quantize_watched",
        ),
        _cells("last_bit", "rows_cuda", "torch"),
        _CASTS,
    ),
    Row("update of delayed scales", "FP32", ("delayed_update",), _EXACT, _CASTS),
    Row(
        "packing, transposes, look-ups",
        "all",
        (
            "pack_weight",
            "pack_4bit",
            "transpose_half",
            "transpose_fp8",
            "look_up",
            "sort_by_expert",
            "add_weighted",
            "keep_allowed",
        ),
        _EXACT,
        _NORMS,
    ),
    Row("rotary embedding, write into the cache", "all", ("rotary", "write_kv", "rotary_write_kv"), _EXACT, _CASTS),
    Row(
        "norms, gated activations, their gradients",
        "FP32, BF16, FP16",
        ("rms_norm", "rms_norm_backward", "silu_mul", "silu_mul_backward"),
        _cells("last_bit", "rows_cuda", "torch"),
        _NORMS,
    ),
    Row("choice of experts", "FP32, BF16", ("choose_experts",), _cells("last_bit", "torch", "torch")),
    Row(
        "product",
        "FP8 x FP8, scales by tensor or row",
        ("scaled_mm", "scaled_mm_add", "packed_mm"),
        _FP8_PRODUCT,
        _GEMM,
    ),
    Row("product", "FP8 x FP8, scales by block", ("scaled_mm", "packed_mm", "joined_mm"), _FP8_PRODUCT, _GEMM),
    Row(
        "product",
        "BF16 x FP8 (w8a16)",
        ("scaled_mm", "scaled_mm_add", "packed_mm", "joined_mm"),
        _BF16_PRODUCT,
        _GEMM,
    ),
    Row("product", "MXFP8 x MXFP8", ("mx_mm",), _MX_PRODUCT, _GEMM),
    Row("product", "MXFP8 x BF16", ("mx_mm",), _BF16_WITHOUT_INVARIANT, _GEMM),
    Row("product", "NVFP4 x NVFP4", ("nvfp4_mm",), _MX_PRODUCT, _GEMM),
    Row("product", "BF16 x NVFP4", ("mm_4bit",), _BF16_PRODUCT, _GEMM),
    Row("product", "BF16 x MXFP4", ("mm_4bit",), _BF16_PRODUCT, _GEMM),
    Row("product", "BF16 x BF16", ("mm", "packed_mm"), _BF16_PRODUCT | dict.fromkeys(CHIPS, "torch"), _GEMM),
    Row("product of experts", "FP8 x FP8", ("grouped_mm",), _FP8_EXPERTS, _EXPERTS),
    Row("product of experts", "MXFP8 x MXFP8", ("grouped_mm",), _MX_PRODUCT, _GEMM),
    Row("product of experts", "BF16 x FP8, MXFP8 or BF16", ("grouped_mm",), _BF16_WITHOUT_INVARIANT, _GEMM),
    Row("product of experts", "BF16 x NVFP4 or MXFP4", ("grouped_mm_4bit",), _BF16_WITHOUT_INVARIANT, _GEMM),
    Row(
        "experts, with activation and casts",
        "FP8 x FP8",
        ("grouped_mlp",),
        _FP8_EXPERTS,
        _EXPERTS,
    ),
    Row("gradient of an adapter's weight", "BF16", ("wgrad",), _BF16_GRADIENT),
    Row("attention", "BF16 queries, BF16 keys", ("paged_attention",), _BF16_ATTENTION, _ATTENTION),
    Row("attention", "BF16 queries, FP8 keys", ("paged_attention",), _BF16_ATTENTION, _ATTENTION),
    Row(
        "attention",
        "FP32 or FP16",
        ("paged_attention",),
        _cells("tiles16_fp32", "segments512_fp32", "torch_fp64"),
        _ATTENTION,
    ),
    Row("gradient of attention", "BF16", ("attention_backward",), _BF16_GRADIENT | {REFERENCE: "torch_fp64"}),
    Row("sampling", "FP32, BF16", ("sample",), _cells("sums_fp64", "sums_integer", "torch_fp64"), _SAMPLING),
)


def chip_column(architecture: str) -> str:
    """Returns the column of a GPU of this architecture, such as "sm_103": the code that it runs."""
    families = {"sm_90": "sm_90a", "sm_100": "sm_100f", "sm_103": "sm_100f", "sm_120": "sm_120f", "sm_121": "sm_120f"}
    return families.get(architecture, "sm_89")  # which later chips compile


def same_bits(row: Row, column: str, with_subnormals: bool = True) -> list[str]:
    """Returns the columns whose kernels give the bits of this one, itself included; without `with_subnormals` where no
    value and no sum is subnormal in FP32."""
    if CLASSES[row.cells[column]].error is None:
        return [column]
    names = row.cells if with_subnormals else {name: c.removesuffix(FTZ) for name, c in row.cells.items()}
    return [name for name, numerics in names.items() if numerics == names[column]]


def describe_column(column: str, reference_ops: set[str]) -> Iterator[dict[str, object]]:
    """Yields a description of every row on a processor. If only some of a row's ops are in `reference_ops`, which run
    on the reference, there are two, which name their ops."""
    for row in ROWS:
        for actual, is_reference in ((column, False), (REFERENCE, True)):
            ops = [op for op in row.ops if (op in reference_ops) is is_reference]
            if not ops:
                continue
            yield {
                "operation": row.operation if len(ops) == len(row.ops) else f"{row.operation} ({', '.join(ops)})",
                "format": row.format,
                "class": row.cells[actual],
                "same_bits": same_bits(row, actual),
                "same_bits_without_subnormals": same_bits(row, actual, with_subnormals=False),
            }
