"""The failures a user can have, one class each; every message is one sentence that says what was wrong and what to do.

The command line prints the message and exits with 1, the server renders it as a 4xx; neither shows a traceback. A
quoted value may come from a stranger and have any length and any characters: `shown` or `one_line` quote it.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from json import JSONDecodeError

MAX_SHOWN = 80  # characters of a quoted value
MAX_COMPARED = 256  # characters of a name that is compared with others


_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list",
          tuple: "a list", dict: "an object", bytes: "bytes"}  # fmt: skip
# What Python's json says, in words that do not take a knowledge of Python.
_JSON_FAULTS = {
    "Expecting value": "a value is missing",
    "Expecting property name": "a name in double quotes is missing",
    "Expecting ':'": "a colon is missing",
    "Expecting ','": "a comma is missing",
    "Unterminated string": "a string does not end that begins",
    "Invalid control character": "there is a control character, which must be escaped,",
    "Invalid \\": "there is an invalid escape",
    "Extra data": "there is more behind the value",
    "Illegal trailing comma": "there is a comma too many",
    "Exceeds the limit": "it holds a whole number of more than 4,300 digits",
}


def json_kind(value: object) -> str:
    """What a value is that was read from JSON or a table, for a message."""
    return _KINDS.get(type(value), f"of the type {type(value).__name__}")


def json_fault(error: Exception, *, located: bool = True) -> str:
    """What is wrong with a text that is not JSON, by the exception of its reader. located: also where."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeError):
        return "it holds half of a surrogate pair"
    message = str(error)
    fault = next((words for start, words in _JSON_FAULTS.items() if message.startswith(start)), one_line(message))
    if not located or not isinstance(error, JSONDecodeError):
        return fault
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return f"{fault} at {line}character {error.colno}"


def os_reason(error: OSError | UnicodeError) -> str:
    """Why a file cannot be read or written, without the number and the path that Python adds."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    return one_line(error.strerror or error)


def shown(value: object) -> str:
    """`value` as a sentence quotes it: its repr, or null, true and false as JSON writes them, shortened to its
    beginning if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _cut(repr(value))


def one_line(message: object) -> str:
    """Another library's message in the middle of a sentence: without its full stop and line breaks, and not long."""
    return _cut(" ".join(str(message).split()).rstrip("."), 3 * MAX_SHOWN)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The question whether the most similar of the `known` names was meant, to be put behind a sentence, or nothing."""
    by_lower = {other.lower(): other for other in known}
    matches = get_close_matches(name[:MAX_COMPARED].lower(), by_lower, 1)
    return f" Did you mean {by_lower[matches[0]]}?" if matches else ""


def _cut(text: str, most: int = MAX_SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class Fp8ServeError(Exception):
    """Base of every error that is the input's fault and not the program's."""


class RecipeError(Fp8ServeError):
    """A recipe's parameter or name does not exist."""


class ModelError(Fp8ServeError):
    """A model directory is missing, damaged, or of an architecture we do not run."""


class TokenizerError(ModelError):
    """The model's tokenizer fails on a text or on tokens, whatever the request asks for beside them."""


class TakenError(ModelError):
    """The path where a model directory should be written is taken."""


class ScalesError(Fp8ServeError):
    """A scale is missing, zero, negative, not finite, never observed, or belongs to another model."""


class DataError(Fp8ServeError):
    """A text or JSON-lines file cannot be read as examples; names the file and the line."""


class RequestError(Fp8ServeError):
    """A generation request asks for something impossible, such as a prompt longer than the context."""


class JobError(Fp8ServeError):
    """A fine-tune job does not exist, or is not in a state that allows what was asked."""


class ServerError(Fp8ServeError):
    """A server that we ask is away, refuses, or breaks off. `status` and `code` are those of its answer, if any."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class MachineError(Fp8ServeError):
    """This machine lacks what was asked for: a device, a free port, memory, disk."""


class GroupError(MachineError):
    """Of processes that work together one is gone: they did not meet, or it died too often."""
