"""The program of a decode step in one launch: its balance, and that its waits suffice and each is necessary.

decode_step.cu runs it on the emulated GPU with one block for each multiprocessor.
"""

from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from tests.cuda import emulated
from tests.cuda.decode_program import Instruction, Model, Op, Program, make_program
from tests.cuda.emulated import needs_compiler, needs_thread_sanitizer
from tests.cuda.programs import Program as Executable

TINY = Model(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, inter=1040, vocab=48)
LLAMA_1B = Model(layers=22, hidden=2048, heads=32, kv_heads=4, head_dim=64, inter=5632, vocab=32000)
LENGTHS = [300, 20]  # three segments, and one
DECODE_STEP = Executable(emulated.ROOT / "tests/cuda/decode_step.cu")


def write(path: Path, program: Program, epoch: int = 0, steps: int = 2) -> Path:
    listed = program.tensor()
    shape = [len(LENGTHS), listed.shape[0], listed.shape[1], len(program.needs), epoch, steps]
    numbers = [*astuple(TINY), *shape, *LENGTHS, *program.needs]
    ints = torch.cat([torch.tensor(numbers, dtype=torch.int32), listed.flatten()])
    path.write_bytes(ints.numpy().tobytes())
    return path


def tiny(multiprocessors: int) -> Program:
    return make_program(TINY, multiprocessors, len(LENGTHS))


def without_waits(program: Program, op: Op, layer: int) -> Program:
    def change(instruction: Instruction) -> Instruction:
        is_changed = (instruction.op, instruction.layer) == (op, layer)
        return instruction._replace(waits=0) if is_changed else instruction

    return replace(program, instructions=[[change(i) for i in listed] for listed in program.instructions])


@pytest.mark.parametrize("multiprocessors", [1, 4, 132])
def test_every_unit_is_computed_once_and_counted(multiprocessors: int) -> None:
    program = make_program(LLAMA_1B, multiprocessors, rows=8)
    units: Counter[tuple[Op, int, int]] = Counter()
    signals = [0] * len(program.needs)
    for listed in program.instructions:
        assert listed == sorted(listed, key=lambda i: (i.layer, i.op, i.unit))  # no deadlock
        for i in listed:
            if i.op != Op.ATTEND:
                units.update((i.op, i.layer, unit) for unit in range(i.unit, i.unit + i.units))
                signals[i.signal] += i.units
    of_layer = {Op.QKV: 2560 // 32, Op.O: 128, Op.GATE_UP: 352, Op.DOWN: 128}
    assert set(units.values()) == {1}
    assert len(units) == 22 * sum(of_layer.values()) + 2000
    heads = {i.signal for listed in program.instructions for i in listed if i.op == Op.ATTEND}
    assert {signal for at, signal in enumerate(signals) if at in heads} == {0}  # the kernel signals these
    assert all(program.needs[at] == (8 * 4 if at in heads else signal) for at, signal in enumerate(signals))


def test_multiprocessors_read_equally_many_bytes() -> None:
    unit_bytes = {Op.QKV: 32 * 2048, Op.ATTEND: 0, Op.O: 16 * 2048, Op.GATE_UP: 32 * 2048, Op.DOWN: 16 * 5632}
    unit_bytes[Op.HEAD] = 32 * 2048
    program = make_program(LLAMA_1B, 132, rows=1)
    read = [sum(i.units * unit_bytes[i.op] for i in listed) for listed in program.instructions]
    assert max(read) - min(read) <= max(unit_bytes.values())


@pytest.mark.emulator
@needs_compiler
def test_a_step_does_not_depend_on_the_number_and_order_of_blocks(tmp_path: Path) -> None:
    expected, _ = DECODE_STEP.run(write(tmp_path / "one", tiny(1)))
    assert len(set(expected.split())) == 2
    for multiprocessors in (3, 4):
        file = write(tmp_path / "several", tiny(multiprocessors))
        for seed in range(6):
            assert DECODE_STEP.run(file, seed, backwards=seed % 2 == 1)[0] == expected
    file = write(tmp_path / "late", tiny(4), epoch=-1)  # the counters pass 2^32
    assert DECODE_STEP.run(file)[0] == expected


@pytest.mark.emulator
@needs_compiler
def test_a_program_that_waits_for_itself_is_refused(tmp_path: Path) -> None:
    program = tiny(2)
    listed = program.instructions[1]
    listed[0] = listed[0]._replace(wait=next(i.signal for i in listed if i.op == Op.O), waits=1)
    assert DECODE_STEP.run(write(tmp_path / "file", program))[0].startswith("emulator: blocks wait for each other")


@pytest.mark.emulator
@needs_thread_sanitizer
def test_the_waits_of_a_program_suffice(tmp_path: Path) -> None:
    for seed in range(2):
        assert DECODE_STEP.race(write(tmp_path / "file", tiny(3)), seed) == ""


@pytest.mark.emulator
@needs_thread_sanitizer
@pytest.mark.parametrize("op", [op for op in Op if op != Op.END])
def test_every_wait_of_a_program_is_necessary(tmp_path: Path, op: Op) -> None:
    layer = TINY.layers if op == Op.HEAD else 1
    file = write(tmp_path / "file", without_waits(tiny(3), op, layer), steps=1)
    assert "data race" in DECODE_STEP.race(file)


@pytest.mark.emulator
@needs_thread_sanitizer
def test_removing_any_barrier_or_wait_of_the_kernel_is_a_race(tmp_path: Path) -> None:
    file = write(tmp_path / "file", tiny(3))
    unnecessary = [site for site in DECODE_STEP.run(file)[1] if DECODE_STEP.race(file, left_out=site) == ""]
    assert [DECODE_STEP.line_at(site) for site in unnecessary] == []
