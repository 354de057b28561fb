"""The reward of benchmarks/rewards.py: 1 for an answer that begins with the sum, 0 for any other."""

import re
from typing import Any


def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
    match = re.match(r"\s*(\d+)\b", completion)
    return float(match is not None and int(match[1]) == row["sum"])
