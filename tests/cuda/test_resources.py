"""Resources of kernels: the record is complete and within the limits of the chips, and a build does not exceed it."""

from pathlib import Path

import pytest

from tests.cuda import resources, sass
from tests.cuda.resources import DECLARED_SHARED, REGISTERS, Kernels, Usage
from tests.cuda.test_library import BUILT, SOURCES, built

NVCC, RECORDED = resources.recorded()
RESERVED = 1024  # bytes that the system reserves in every block from sm_90 on, which ptxas counts


def test_every_architecture_and_every_file_of_kernels_is_on_record() -> None:
    assert set(RECORDED) == {"sm_89", "sm_90a", "sm_100f", "sm_120f"}
    of_one_chip = {"gemm_sm90.cu": "sm_90a", "gemm_sm100.cu": "sm_100f", "gemm_sm120.cu": "sm_120f"}
    of_one_chip["attention_wgmma.cu"] = "sm_90a"
    with_kernels = {p.name for p in SOURCES.glob("*.cu") if "__global__" in p.read_text()} | set(of_one_chip)
    for arch, kernels in RECORDED.items():
        expected = {name for name in with_kernels if of_one_chip.get(name, arch) == arch}
        assert {name.partition(":")[0] for name in kernels} == expected


@pytest.mark.parametrize("arch", RECORDED)
def test_kernels_fit_every_chip(arch: str) -> None:
    for name, usages in RECORDED[arch].items():
        assert usages, name
        for usage in usages:
            assert 0 < usage.registers <= REGISTERS, name
            assert usage.shared <= DECLARED_SHARED + (0 if arch == "sm_89" else RESERVED), name


# Maximal stack bytes of a thread; kernels that are not listed do not spill.
SPILLS = {
    "sm_89 attention_mma.cu: attend": 96,
    "sm_89 gemm_tall.cu: multiply_tall": 16,
    "sm_89 sample.cu: draw": 8,
    "sm_90a attention_mma.cu: attend": 120,
    "sm_90a attention_tensor.cu: merge_parts": 8,
    "sm_90a gemm_skinny.cu: gemm_stream": 24,
    "sm_90a gemm_sm89.cu: grouped_tile": 8,
    "sm_90a gemm_tall.cu: multiply_tall": 56,
    "sm_90a sample.cu: draw": 8,
    "sm_100f activations.cu: rotate": 16,
    "sm_100f attention_mma.cu: attend": 128,
    "sm_100f gemm_skinny.cu: gemm_stream": 144,
    "sm_100f gemm_sm100.cu: device_kernel": 456,
    "sm_100f gemm_sm89.cu: grouped_tile": 8,
    "sm_100f gemm_tall.cu: multiply_tall": 56,
    "sm_100f training.cu: gated_gradient_casts": 8,
    "sm_100f write_kv.cu: rotate_and_write_rows": 8,
    "sm_120f activations.cu: rotate": 16,
    "sm_120f attention_mma.cu: attend": 136,
    "sm_120f gemm_skinny.cu: gemm_stream": 8,
    "sm_120f gemm_sm120.cu: device_kernel": 24,
    "sm_120f gemm_sm89.cu: grouped_tile": 8,
}


def test_only_listed_kernels_spill() -> None:
    stacks = {
        f"{arch} {name}": max(usage.stack for usage in usages)
        for arch, kernels in RECORDED.items()
        for name, usages in kernels.items()
    }
    assert {name: stack for name, stack in stacks.items() if stack} == SPILLS


@built
@pytest.mark.skipif(sass.cuobjdump() is None, reason="cuobjdump is not installed")
@pytest.mark.parametrize("library", BUILT, ids=lambda path: path.parent.name)
def test_a_build_needs_no_more_than_the_record(library: Path) -> None:
    if resources.compiler(library) != NVCC:
        pytest.skip("compiled by another nvcc than the record")
    tool = sass.cuobjdump()
    assert tool is not None
    kernels = resources.measured(library, tool)
    assert kernels
    assert resources.complaints(kernels, RECORDED) == [], (
        "if this is necessary, record it: make cuda CUDA_RECORD=--record"
    )


KNOWN: Kernels = {
    "sm_89": {"a.cu: add": [Usage(10, 0, 64), Usage(20, 8, 0)]},
    "sm_90a": {"b.cu: cut": [Usage(9, 0, 0)]},
}


@pytest.mark.parametrize(
    ("usages", "expected"),
    [
        ([Usage(10, 0, 64), Usage(20, 8, 0)], []),
        ([Usage(9, 0, 64), Usage(20, 4, 0)], []),
        ([Usage(10, 0, 64), Usage(21, 8, 0)], ["sm_89 a.cu: add: 21 registers where 20 are on record"]),
        ([Usage(10, 0, 64), Usage(20, 12, 0)], ["sm_89 a.cu: add: 12 stack where 8 are on record"]),
        ([Usage(10, 0, 96), Usage(20, 8, 0)], ["sm_89 a.cu: add: 96 shared where 64 are on record"]),
        ([Usage(10, 0, 64)], ["sm_89 a.cu: add: 1 instances, on record are 2"]),
    ],
)
def test_larger_resources_and_other_numbers_of_instances_are_reported(usages: list[Usage], expected: list[str]) -> None:
    """Only the architectures of the build are compared."""
    assert resources.complaints({"sm_89": {"a.cu: add": usages}}, KNOWN) == expected


def test_added_and_removed_kernels_are_reported() -> None:
    kernels = {"sm_89": {"c.cu: new": [Usage(1, 0, 0)]}}
    assert resources.complaints(kernels, KNOWN) == [
        "sm_89 a.cu: add: 0 instances, on record are 2",
        "sm_89 c.cu: new: 1 instances, on record are 0",
    ]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    resources.record("13.0.88", KNOWN, tmp_path / "r.json")
    assert resources.recorded(tmp_path / "r.json") == ("13.0.88", KNOWN)
