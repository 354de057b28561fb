"""The exceptions for errors of the user's input, and helpers for their messages, which are one sentence each.

The command line prints the message and exits with status 1. The server returns the message with a 4xx status. Untrusted
values may have any length and any characters, so messages quote them with `shown` or `one_line`.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from json import JSONDecodeError

MAX_QUOTED_CHARACTERS = 80
MAX_COMPARED_CHARACTERS = 256  # of a name, because comparing takes quadratic time


_JSON_TYPES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list",
          tuple: "a list", dict: "an object", bytes: "bytes"}  # fmt: skip
# How messages of Python's json module begin, and what they mean.
_JSON_FAULTS = {
    "Expecting value": "a value is missing",
    "Expecting property name": "a name in double quotes is missing",
    "Expecting ':'": "a colon is missing",
    "Expecting ','": "a comma is missing",
    "Unterminated string": "it is cut off inside the string that begins",
    "Invalid control character": "there is a control character, which must be escaped,",
    "Invalid \\": "there is an invalid escape",
    "Extra data": "there is more behind the value",
    "Illegal trailing comma": "there is a comma too many",
    "Exceeds the limit": "it holds a whole number of more than 4,300 digits",
}


def json_kind(value: object) -> str:
    """Returns the JSON type of a value for a message, such as "an object"."""
    return _JSON_TYPES.get(type(value), f"of the type {type(value).__name__}")


def json_fault(error: Exception, *, located: bool = True) -> str:
    """Returns a clause that says why a text is not JSON, for the exception of `json.loads`. `located` adds the line and
    the character."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeError):
        return "it holds half of a surrogate pair"
    message = str(error)
    fault = next((words for start, words in _JSON_FAULTS.items() if message.startswith(start)), one_line(message))
    if not isinstance(error, JSONDecodeError):
        return fault
    if error.pos > 0 and not error.doc[error.pos :].strip():
        fault = "it is cut off"
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return f"{fault} at {line}character {error.colno}" if located else fault


def os_reason(error: OSError | UnicodeError) -> str:
    """Returns why a file cannot be read or written, without the error number and the path that Python adds."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    return one_line(error.strerror or error)


def shown(value: object) -> str:
    """Returns a value as messages quote it: its repr, or JSON's null, true and false, truncated if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _truncate(repr(value))


def one_line(message: object) -> str:
    """Returns another library's message as a clause: on one line, without its full stop, truncated if it is long."""
    return _truncate(" ".join(str(message).split()).rstrip("."), 3 * MAX_QUOTED_CHARACTERS)


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """Returns the sentence " Did you mean X?" for the most similar known name, or "" if none is similar."""
    by_lower = {other.lower(): other for other in candidates}
    matches = get_close_matches(name[:MAX_COMPARED_CHARACTERS].lower(), by_lower, 1)
    return f" Did you mean {by_lower[matches[0]]}?" if matches else ""


def _truncate(text: str, max_characters: int = MAX_QUOTED_CHARACTERS) -> str:
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


class Fp8ServeError(Exception):
    """The base class of errors that the user's input or machine causes, not a fault in the program."""


class RecipeError(Fp8ServeError):
    """A recipe or one of its parameters does not exist or is invalid."""


class ModelError(Fp8ServeError):
    """A model directory is missing or damaged, or its architecture is not supported."""


class IncompleteError(ModelError):
    """Some weights of a model, or scales of its weights, are missing."""


class TokenizerError(ModelError):
    """The model's tokenizer fails on a text or on token ids."""


class TakenError(ModelError):
    """The output path of a model directory exists already."""


class ScalesError(Fp8ServeError):
    """A scale is missing, zero, negative, not finite, never observed, or belongs to another model."""


class DataError(Fp8ServeError):
    """A data file cannot be read or contains an invalid row."""


class RequestError(Fp8ServeError):
    """The parameters of a request are invalid, or a limit is exceeded, such as a prompt longer than the context."""


class JobError(Fp8ServeError):
    """A fine-tune job does not exist, or its state does not allow the operation."""


class ServerError(Fp8ServeError):
    """A server cannot be reached, returns an error, or closes the connection. `status` and `code` are those of the
    error response, if there is one."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class MachineError(Fp8ServeError):
    """This machine lacks a device, a free port, memory or disk space."""


class GroupError(MachineError):
    """The processes of a distributed run could not connect, or one of them died too often."""
