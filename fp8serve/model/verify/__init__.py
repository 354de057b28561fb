"""Checks whether a checkpoint is what it says it is, from headers, scales and FP8 codes; no model is built.

`subject.py` reads a directory, a shard or a single file, however damaged, by names, types and shapes alone, so that an
architecture need not be known. Each check is a function from that subject to its findings; `report.py` has the table
of them. A new check is a function and a row.

Codes say much about their scale. Quantizing by amax uses the largest code, 448, in every tensor, row or block; so codes
that stay small, or pile up at 448, were made with another scale. The dequantized weights of every trained model have a
mean size between about 1e-6 and 3, which tells a scale from its reciprocal.
"""

from fp8serve.model.verify.finding import Finding
from fp8serve.model.verify.report import CHECKS, verify

__all__ = ["CHECKS", "Finding", "verify"]
