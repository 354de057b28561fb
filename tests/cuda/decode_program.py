"""The program of a decode step in one launch: what every multiprocessor computes, in which order, after what.

The launch has one block for each multiprocessor. A block runs its list of instructions, which is the same in every
step. An instruction computes units of one operation: rows of a weight, which it reads once. It waits until counters
have reached the number of signals that they get in a step (`Program.needs`), and adds its units to one counter itself.
Counters are never set to zero: in step n (from 0), a counter is compared with (n + 1) times its need, modulo 2^32.

| operation | a unit computes | waits for | counter |
|---|---|---|---|
| QKV | 16 rows of a head and their partners in the rotation | all DOWN of the layer before | of the head of k and v |
| ATTEND | dealt by the kernel: a segment of a sequence and a head of k and v | that head's counter | of the layer |
| O | 16 rows | all ATTEND | of the layer |
| GATE_UP | 16 rows of both | all O | of its slice of 1,024 rows |
| DOWN | 16 rows | all slices | of the layer |
| HEAD | 16 rows of logits | all DOWN of the last layer | of the step |

Every list is in the order of (layer, operation, unit), and all blocks are resident, so the first unit that is not
finished never waits for a later one: no deadlock. The buffer of each operation is written again one layer later,
and whoever read it has signalled by then, because every chain of waits passes through all units of each operation.

The units of an operation are dealt so that the bytes of weights read since the beginning of the step stay equal:
160 units on 132 multiprocessors do not balance alone, a layer does.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16  # weight rows of an mma
SLICE = 1024  # rows of gate and up that share a counter


class Op(IntEnum):
    END, QKV, ATTEND, O, GATE_UP, DOWN, HEAD = range(7)  # noqa: E741


class Instruction(NamedTuple):
    """Units [unit, unit + units) of an operation. It waits for the counters [wait, wait + waits)."""

    op: Op
    layer: int
    unit: int
    units: int
    wait: int
    waits: int
    signal: int


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int

    @property
    def units_of_kv_head(self) -> int:
        """Units of QKV that the attention of one head of k and v reads: its heads of q, k and v."""
        return (self.heads // self.kv_heads + 2) * self.head_dim // (2 * BLOCK)


@dataclass(frozen=True)
class Program:
    """instructions: by multiprocessor. needs: the signals that each counter gets in a step."""

    instructions: list[list[Instruction]]
    needs: list[int]

    def tensor(self) -> Tensor:
        """Returns int32 [multiprocessors, longest list + 1, 8], filled up with zeros (`Op.END`)."""
        out = torch.zeros(len(self.instructions), max(map(len, self.instructions)) + 1, 8, dtype=torch.int32)
        for rows, listed in zip(out, self.instructions, strict=True):
            for row, instruction in zip(rows, listed, strict=False):
                row[: len(instruction)] = torch.tensor(instruction)
        return out


class _Maker:
    """Deals units to multiprocessors, in the order of the step."""

    def __init__(self, multiprocessors: int) -> None:
        self.instructions: list[list[Instruction]] = [[] for _ in range(multiprocessors)]
        self.needs: list[int] = []
        self._bytes = [0] * multiprocessors

    def counters(self, needs: list[int]) -> range:
        first = len(self.needs)
        self.needs += needs
        return range(first, len(self.needs))

    def deal(self, op: Op, layer: int, wait: range, signals: range, row_bytes: int) -> None:
        """Deals as many units as `signals` need in all; each multiprocessor gets neighbouring ones."""
        owners = [counter for counter in signals for _ in range(self.needs[counter])]
        begin = 0
        for at, count in enumerate(self._counts(len(owners), row_bytes)):
            for unit, units in _runs(owners, begin, begin + count):
                self.instructions[at].append(Instruction(op, layer, unit, units, wait.start, len(wait), owners[unit]))
            begin += count

    def attend(self, layer: int, wait: range, signal: int) -> None:
        for at, listed in enumerate(self.instructions):
            listed.append(Instruction(Op.ATTEND, layer, at, 1, wait.start, len(wait), signal))

    def _counts(self, units: int, unit_bytes: int) -> list[int]:
        """Gives each unit to the multiprocessor that has read the fewest bytes so far."""
        counts = [0] * len(self._bytes)
        fewest = [(read, at) for at, read in enumerate(self._bytes)]
        heapq.heapify(fewest)
        for _ in range(units):
            read, at = fewest[0]
            counts[at] += 1
            heapq.heapreplace(fewest, (read + unit_bytes, at))
        for read, at in fewest:
            self._bytes[at] = read
        return counts


def _runs(owners: list[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields (first, number) of the runs of units in [begin, end) that signal the same counter."""
    while begin < end:
        number = next((i for i in range(end - begin) if owners[begin + i] != owners[begin]), end - begin)
        yield begin, number
        begin += number


def make_program(model: Model, multiprocessors: int, rows: int) -> Program:
    """Returns the program of a step with `rows` sequences. Weights are FP8, those of the head BF16."""
    maker = _Maker(multiprocessors)
    query = model.heads * model.head_dim
    before = range(0)
    for layer in range(model.layers):
        qkv = maker.counters([model.units_of_kv_head] * model.kv_heads)
        heads = maker.counters([rows * model.kv_heads])
        o = maker.counters([model.hidden // BLOCK])
        slices = maker.counters([min(SLICE, model.inter - at) // BLOCK for at in range(0, model.inter, SLICE)])
        down = maker.counters([model.hidden // BLOCK])
        maker.deal(Op.QKV, layer, before, qkv, 2 * BLOCK * model.hidden)
        maker.attend(layer, qkv, heads[0])
        maker.deal(Op.O, layer, heads, o, BLOCK * query)
        maker.deal(Op.GATE_UP, layer, o, slices, 2 * BLOCK * model.hidden)
        maker.deal(Op.DOWN, layer, slices, down, BLOCK * model.inter)
        before = down
    maker.deal(Op.HEAD, model.layers, before, maker.counters([model.vocab // BLOCK]), 2 * BLOCK * model.hidden)
    return Program(maker.instructions, maker.needs)
