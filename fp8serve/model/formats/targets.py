"""Matches layers with the targets of a quantization configuration, as compressed-tensors and ModelOpt do.

A target is a class ("Linear"), a module's name or the end of it, a wildcard, or `re:` and a regular expression that
matches from the beginning of the name. Expressions are untrusted, and some take Python's `re` practically forever.
Pydantic's engine, which this module uses, takes time linear in the length of the name. It has no look-around and no
back-references, so a checkpoint that uses these is refused.
"""

import fnmatch
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated

from fp8serve.errors import ModelError, shown

CLASS = "Linear"  # the only class that is quantized
_PREFIX = "re:"
MAX_TARGETS, MAX_EXPRESSIONS, MAX_EXPRESSION_CHARS = 10_000, 100, 1_000  # a hundred times what published files hold


def check_targets(targets: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Returns `targets`. Raises ModelError if there are too many, or if a regular expression cannot be parsed."""
    expressions = [t.removeprefix(_PREFIX) for t in targets if t.startswith(_PREFIX)]
    if len(targets) > MAX_TARGETS or len(expressions) > MAX_EXPRESSIONS:
        raise ModelError(
            f"{where} has {len(targets)} targets, {len(expressions)} of them regular expressions; "
            f"the limits are {MAX_TARGETS} and {MAX_EXPRESSIONS}."
        )
    for expression in expressions:
        _compile(expression)
    return targets


def is_pattern(target: str) -> bool:
    """Returns whether `target` is a regular expression or a wildcard."""
    return target.startswith(_PREFIX) or any(char in target for char in "*?[")


def matches(target: str, linear: str) -> bool:
    """Returns whether `target` matches the layer `linear`. Raises ModelError for an unsupported regular expression."""
    if target.startswith(_PREFIX):
        return _compile(target.removeprefix(_PREFIX))(linear)
    return target in (CLASS, linear) or linear.endswith(f".{target}") or fnmatch.fnmatchcase(linear, target)


@lru_cache(maxsize=256)
def _compile(pattern: str) -> Callable[[str], bool]:
    if len(pattern) > MAX_EXPRESSION_CHARS:
        raise ModelError(
            f"quantization_config names layers by the regular expression {shown(pattern)}, which has {len(pattern)} "
            f"characters; at most {MAX_EXPRESSION_CHARS} are supported."
        )
    from pydantic import PydanticUserError, StringConstraints, TypeAdapter, ValidationError
    from pydantic_core import SchemaError

    try:
        adapter = TypeAdapter(Annotated[str, StringConstraints(pattern=f"^(?:{pattern})")])
    except (SchemaError, PydanticUserError):
        raise ModelError(
            f"quantization_config names layers by {shown(_PREFIX + pattern)}, which is no regular expression or uses "
            "look-around or back-references, which are not supported; write the layers' names instead."
        ) from None

    def matches(name: str) -> bool:
        try:
            adapter.validate_python(name)
        except ValidationError:
            return False
        return True

    return matches
