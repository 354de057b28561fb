"""`python -m fp8serve` is the command line."""

import os
import sys

try:  # before any other import: see processes.py
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]
except FileNotFoundError:  # there is no current directory
    pass

from fp8serve.cli import main

sys.exit(main())
