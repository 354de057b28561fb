"""How processes of ours end at once: workers, because their owner waits for it, and a server that has not begun.

The interpreter needs one to three seconds to shut down a process with torch, and frees nothing that the operating
system does not free anyway.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn


def end_process(status: int) -> NoReturn:
    """Ends the process with `status`, after what was printed; neither finalizers nor `atexit` run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def ends_when_asked() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGINT end the process at once with status 0, unless it handles them itself.

    For what has nothing to finish yet. Python's own handling would show a KeyboardInterrupt, or lose it in an import;
    and the first process of a container ignores a SIGTERM that it does not handle. Before the block, while Python
    imports the command line, a signal does what it does to any program: a shell then sees 143.
    """

    def end(*_: Any) -> NoReturn:
        os._exit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
