"""Typed access to untrusted JSON: a value of another type than expected is an error that names its place.

`fields.text("fmt")` is None when the key is missing or null, like every other getter, and text otherwise. So code that
reads a configuration never meets a list where it expects a number, and needs no check of its own.
"""

from collections.abc import Mapping
from typing import Any

from fp8serve.errors import Fp8ServeError, ModelError, shown


class Fields:
    """The object `value`, whose place is `where` ("config.json: quantization_config"). `error` if it is not an
    object."""

    def __init__(self, value: Any, where: str, error: type[Fp8ServeError] = ModelError) -> None:
        self.where, self._error = where, error
        if not isinstance(value, Mapping):
            raise error(f"{where} is {shown(value)} where an object was expected.")
        self._values: Mapping[str, Any] = value

    def text(self, key: str) -> str | None:
        value: str | None = self._of_type(key, str, "text")
        return value

    def whole(self, key: str) -> int | None:
        value: int | None = self._of_type(key, int, "a whole number")
        return value

    def boolean(self, key: str) -> bool | None:
        value: bool | None = self._of_type(key, bool, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of text; empty when there is none."""
        value = self._of_type(key, list, "a list of text") or []
        if not all(isinstance(item, str) for item in value):
            raise self.complain(key, "a list of text")
        return tuple(value)

    def object(self, key: str) -> "Fields | None":
        value = self._values.get(key)
        return None if value is None else Fields(value, f"{self.where}.{key}", self._error)

    def objects(self, key: str) -> "list[Fields]":
        """The objects in an object, whatever their names; empty when there is none."""
        if (found := self.object(key)) is None:
            return []
        return [Fields(v, f"{found.where}.{shown(k)}", self._error) for k, v in found._values.items()]

    def anything(self, key: str, default: Any = None) -> Any:
        """For values that are compared only, and quoted by `shown`."""
        return self._values.get(key, default)

    @property
    def says_something(self) -> bool:
        """Whether any value in it is not null or empty."""
        return any(self._values.values())

    def complain(self, key: str, expected: str) -> Fp8ServeError:
        return self._error(f"{self.where}.{key} is {shown(self._values.get(key))} where {expected} was expected.")

    def _of_type(self, key: str, kind: type, expected: str) -> Any:
        value = self._values.get(key)
        if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        raise self.complain(key, expected)
