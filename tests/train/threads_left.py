"""Runs the command line with the given arguments, and prints the names of the threads that are left after it."""

import sys
from pathlib import Path

from fp8serve.cli import main

status = main()
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print(f"threads left: {sorted(names)}\n", end="", file=sys.stderr, flush=True)
sys.exit(status)
