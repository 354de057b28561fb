"""Is a checkpoint what it says it is? Read from headers, scales and the codes of FP8 weights; no model is built.

`subject.py` reads a directory, a shard or a single file, however damaged, by names, types and shapes alone, so that an
architecture need not be known. Each check is a function from that subject to its findings; `report.py` has the table
of them. A new check is a function and a row.

Codes say much about their scale. Whoever quantizes by amax uses the largest code, 448, in every tensor, row or block;
so codes that stay small, or pile up at 448, were made by another scale. What a weight is multiplied out to is between
about 1e-6 and 3 in the mean of every model that was ever trained, which tells a scale from its reciprocal.
"""

from fp8serve.model.verify.finding import Finding
from fp8serve.model.verify.report import CHECKS, verify

__all__ = ["CHECKS", "Finding", "verify"]
