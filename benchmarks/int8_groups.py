"""How many INT8 products an exact product of FP8 weights would take on a processor with VNNI.

    python -m benchmarks.int8_groups MODEL_DIR

An INT8 instruction multiplies twice as many pairs as `vdpbf16ps`. An E4M3 number has four significant bits, so INT8
holds numbers of four neighboring exponents exactly (15 x 2^3 = 120). A tile of weights whose exponents span more is a
sum of several INT8 matrices, one for each group of four exponents, and each is multiplied by each of the groups of the
activations. So INT8 wins only if a tile needs one group and the activations need one too: with two products it is even
with BF16. MODEL_DIR has E4M3 weights; a tile is that of the AVX-512 kernels, 16 rows x 64 columns.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.model.storage.shards import open_shards

ROWS, COLUMNS, EXPONENTS = 16, 64, 4


def count_groups(weight: Tensor) -> Tensor:
    """Returns how many groups of four exponents each whole tile of an E4M3 matrix needs, int64 [tiles]."""
    rows, columns = weight.shape[0] // ROWS, weight.shape[1] // COLUMNS
    codes = weight.view(torch.uint8)[: rows * ROWS, : columns * COLUMNS] & 0x7F
    tiles = codes.view(rows, ROWS, columns, COLUMNS).transpose(1, 2).reshape(rows * columns, -1)
    exponents = (tiles >> 3).clamp(min=1).long()  # subnormal numbers are multiples of the same unit as 2^-6
    largest = exponents.masked_fill(tiles == 0, 1).amax(1)
    smallest = torch.minimum(exponents.masked_fill(tiles == 0, 15).amin(1), largest)
    return (largest - smallest) // EXPONENTS + 1


def main(model_dir: str) -> None:
    counts = torch.zeros(5, dtype=torch.long)
    for tensor in open_shards(Path(model_dir)).values():
        if tensor.dtype == torch.float8_e4m3fn and tensor.dim() == 2:
            counts += torch.bincount(count_groups(tensor), minlength=5)
    shares = {groups: round(int(count) / max(1, int(counts.sum())), 4) for groups, count in enumerate(counts) if groups}
    print(json.dumps({"tiles": int(counts.sum()), "share of tiles by groups": shares}))


if __name__ == "__main__":
    main(*sys.argv[1:])
