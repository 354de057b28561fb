"""`python -m fp8serve` is the command line."""

import sys

from fp8serve.cli import main

sys.exit(main())
