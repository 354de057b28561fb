"""Runs the command line with `python -m fp8serve`."""

import os
import sys

try:  # must run before any other import; processes.py says why
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]
except FileNotFoundError:  # the current directory was deleted
    pass

from fp8serve.cli import main

sys.exit(main())
