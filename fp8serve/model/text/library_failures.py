"""Failures of the `tokenizers` library as errors of ours.

The library reports a tokenizer that it cannot run in two ways: as a plain `Exception`, or as a panic of Rust, which
reaches Python as a `PanicException` that is no `Exception`, after Rust has written several lines about it to the
descriptor of standard error. A tokenizer is a stranger's file, so both are ordinary, and both become one sentence. What
other threads write to standard error meanwhile comes a moment later.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from functools import cache

from fp8serve.errors import Fp8ServeError, one_line

_OWN_ERRORS = (Fp8ServeError, MemoryError, OSError)
"""What passes as it is."""
_STDERR = 2
_redirection = threading.RLock()


@contextlib.contextmanager
def library_failures(kind: type[Fp8ServeError], sentence: str) -> Iterator[None]:
    """Turns a failure of the library inside the block into an error of this kind, whose message begins with
    `sentence`. Costs 10 µs."""
    with _redirection, _held_stderr() as held:
        try:
            yield
        except BaseException as error:
            if is_panic(error):
                os.ftruncate(held, 0)
            raise failure_as(kind, sentence, error) from None


def failure_as(kind: type[Fp8ServeError], sentence: str, error: BaseException) -> BaseException:
    """The error to raise for a failure of the library: `error` itself if it is not one."""
    if isinstance(error, _OWN_ERRORS) or not (is_panic(error) or isinstance(error, Exception)):
        return error
    return kind(f"{sentence}: {one_line(error)}.")


def is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # its class cannot be imported


@contextlib.contextmanager
def _held_stderr() -> Iterator[int]:
    """What is written to the descriptor of standard error inside the block goes into a file, and at its end, if it is
    still there, to where it belongs."""
    held = _file()
    try:
        stderr = os.dup(_STDERR)
    except OSError:  # this process has none
        yield held
        return
    try:
        os.dup2(held, _STDERR)
        yield held
    finally:
        os.dup2(stderr, _STDERR)
        if size := os.lseek(held, 0, os.SEEK_END):
            with contextlib.suppress(OSError):
                os.write(stderr, os.pread(held, size, 0))
            os.lseek(held, 0, os.SEEK_SET)
            os.ftruncate(held, 0)
        os.close(stderr)


@cache
def _file() -> int:
    """The descriptor of one for the life of the process."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
