"""How many instructions the inner loops of an FP8 product take on each level of the CPU library, without running it.

    python -m benchmarks.inner_loops LIBRARY... [--objdump PROGRAM]

prints a table for libraries of one processor family: `build/*/libfp8serve_cpu.so`, or with `--objdump
aarch64-linux-gnu-objdump` what `make arm` has compiled. The libraries must have their symbols. A number is the
instructions of a loop for 64 multiply-adds, so levels with registers of different sizes can be compared. It says
nothing about how many of them a processor starts at a time.
"""

import argparse
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

LEVELS = ("avx2", "avx512", "avx512bf16", "neon", "neonfhm", "neonbf16")
E4M3 = r"[^<]*Fp8Source<[^<]*Format<3, .*"
FUNCTIONS = {
    "from a panel": r"::{level}_level::panel_rows<{rows}, false>",
    "in place": rf"::{{level}}_level::stream_rows<({{rows}}, false, {E4M3}|{E4M3}, {{rows}}, false)>",
    "packed": rf"::packed_{{level}}::.*sum_rows<{{rows}}, false, {E4M3}::Dot>",
}
"""The functions that multiply without block scales: by columns in a panel, and by E4M3 columns as they are stored."""
COLUMNS = (("from a panel", 1), ("from a panel", 6), ("in place", 1), ("in place", 4), ("packed", 1), ("packed", 4))
"""Functions and their rows."""

_SYMBOL = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(\S+) *(.*)$")
_BRANCH = re.compile(r"^(j\w+|b(\.\w+)?|cbn?z|tbn?z)$")
_X86_MULTIPLY_ADD = re.compile(r"^(vfmadd\d+ps|vdpbf16ps)$")
_ARM_MULTIPLY_ADD = re.compile(r"^(fmla|fmlal2?|bfmlal[bt])$")


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str

    def multiply_adds(self) -> int:
        """Returns how many products it adds to sums in FP32."""
        if _X86_MULTIPLY_ADD.match(self.name):
            lanes = 16 if "%zmm" in self.operands else 8 if "%ymm" in self.operands else 4
            return 2 * lanes if self.name == "vdpbf16ps" else lanes
        return 4 if _ARM_MULTIPLY_ADD.match(self.name) else 0

    def target(self) -> int | None:
        """Returns the address of the instruction that may come next, if this is a branch."""
        address = re.search(r"\b([0-9a-f]+) <", self.operands)
        return int(address[1], 16) if address and _BRANCH.match(self.name) else None


def functions(listing: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Yields the name and the instructions of each function that objdump has listed."""
    name, code = "", list[Instruction]()
    for line in listing.splitlines():
        if symbol := _SYMBOL.match(line):
            yield name, code
            name, code = symbol[1], []
        elif match := _INSTRUCTION.match(line):
            code.append(Instruction(int(match[1], 16), match[2], match[3]))
    yield name, code


def per_64(code: list[Instruction]) -> float | None:
    """Returns the instructions for 64 multiply-adds of the shortest innermost loop with most of them, or None."""
    indices = {instruction.address: index for index, instruction in enumerate(code)}
    loops = [
        (begin, end)
        for end, instruction in enumerate(code)
        if (begin := indices.get(instruction.target() or -1, len(code))) <= end
    ]
    sizes = []
    for begin, end in loops:
        if not any(begin <= other[0] and other[1] <= end and other != (begin, end) for other in loops):
            body = code[begin : end + 1]
            sizes.append((sum(instruction.multiply_adds() for instruction in body), -len(body)))
    products, instructions = max(sizes, default=(0, 0))
    return -64 * instructions / products if products else None


def count(listing: str) -> dict[tuple[str, str, int], float]:
    """Returns the instructions for 64 multiply-adds, by level, function and rows."""
    result = {}
    for name, code in functions(listing):
        for level in LEVELS:
            for kind, rows in COLUMNS:
                matches = re.search(FUNCTIONS[kind].format(level=level, rows=rows), name)
                if matches and (instructions := per_64(code)) is not None:
                    result[level, kind, rows] = instructions
    return result


def table(counts: dict[tuple[str, str, int], float]) -> str:
    columns = [column for column in COLUMNS if any((kind, rows) == column for _, kind, rows in counts)]
    header = ["level", *(f"{kind}, {rows} row{'s' * (rows > 1)}" for kind, rows in columns)]
    lines = [header, ["---"] * len(header)]
    for level in LEVELS:
        cells = [counts.get((level, *column)) for column in columns]
        if any(cells):
            lines.append([f"`{level}`", *("" if cell is None else f"{cell:.1f}" for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", metavar="LIBRARY")
    parser.add_argument("--objdump", default="objdump", metavar="PROGRAM")
    options = parser.parse_args()
    counts = {}
    for library in options.libraries:
        command = [options.objdump, "-d", "-C", "--no-show-raw-insn", library]
        listing = subprocess.run(command, capture_output=True, text=True)
        if listing.returncode:
            parser.error(f"{library} cannot be disassembled: {listing.stderr.strip()}")
        counts |= count(listing.stdout)
    if not counts:
        parser.error("no function of a product was listed: an installed library has no symbols; give that in build/")
    print(table(counts))


if __name__ == "__main__":
    main()
