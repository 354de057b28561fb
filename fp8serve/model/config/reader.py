"""Typed access to the keys of `config.json`; every complaint names file, key and value. No torch here."""

from collections.abc import Mapping
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.family import Family
from fp8serve.model.config.keys import HONOURED

# Sizes that no model exceeds, so that a hostile size is refused before a module or a list of that size is made.
MOST = {"num_hidden_layers": 2_000, "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16}
_LARGEST = 1e38  # of a number that is computed with in FP32


class Reader:
    """The keys that a family honours, with its defaults for those that the file leaves out."""

    def __init__(self, raw: Mapping[str, Any], family: Family, where: str) -> None:
        self.raw, self.family, self.where = raw, family, where

    def __call__(self, key: str) -> Any:
        readable = key in HONOURED or key in self.family.optional
        default = self.family.defaults.get(key)
        return self.raw.get(key, default) if readable else default

    def positive(self, key: str, default: int | None = None) -> int:
        value = self(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.complain(key, value, "a positive whole number")
        if value > (most := MOST.get(key, 2**28)):
            raise self.complain(key, value, f"at most {most}")
        return value

    def number(self, key: str) -> float:
        return positive_number(self(key), key, self.where)

    def optional_number(self, key: str) -> float | None:
        return None if self(key) is None else self.number(key)

    def boolean(self, key: str) -> bool:
        value = self(key)
        if not isinstance(value, bool):
            raise self.complain(key, value, "true or false")
        return value

    def token(self, key: str) -> int | None:
        ids = token_ids(self(key), key, self.where)
        return ids[0] if ids else None

    def complain(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.where}: {key} is {shown(value)} where {expected} was expected.")


def positive_number(value: Any, key: str, where: str, default: float | None = None) -> float:
    """`value`, or `default` where it is null, as a float. ModelError unless it is finite and above 0."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:  # NaN fails, too
        raise ModelError(f"{where}: {key} is {shown(value)} where a positive number was expected.")
    return float(value)


def token_ids(value: Any, key: str, where: str) -> tuple[int, ...]:
    """`eos_token_id` is a number or a list of numbers, `bos_token_id` a number; null is none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
        raise ModelError(f"{where}: {key} is {shown(value)} where a token id was expected.")
    return tuple(ids)
