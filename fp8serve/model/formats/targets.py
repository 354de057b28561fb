"""Which layers a quantization configuration's target names: compressed-tensors' rules and ModelOpt's wildcards.

A target is a class ("Linear"), a module's name or its last part, a wildcard, or `re:` and a regular expression that
matches from the beginning of the name. Expressions come from strangers, and some take Python's `re` practically
forever. Here they run in pydantic's engine, whose time is linear in the name; it has no look-around and no
back-references, and a checkpoint that uses them is refused.
"""

import fnmatch
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated

from fp8serve.errors import ModelError, shown

CLASS = "Linear"  # the one class that is quantized
_PREFIX = "re:"
MAX_TARGETS, MAX_EXPRESSIONS, MAX_EXPRESSION_CHARS = 10_000, 100, 1_000  # a hundred times what published files hold


def checked(targets: tuple[str, ...], where: str) -> tuple[str, ...]:
    """`targets`, after parsing every regular expression in them. ModelError: one cannot be parsed, or there are too
    many."""
    expressions = [t.removeprefix(_PREFIX) for t in targets if t.startswith(_PREFIX)]
    if len(targets) > MAX_TARGETS or len(expressions) > MAX_EXPRESSIONS:
        raise ModelError(
            f"{where} lists {len(targets)} layers, {len(expressions)} by regular expressions; "
            f"at most {MAX_TARGETS} and {MAX_EXPRESSIONS} are read."
        )
    for expression in expressions:
        _expression(expression)
    return targets


def matches(target: str, linear: str) -> bool:
    """Whether `target` names the layer `linear`. ModelError: it is not a regular expression that can be read."""
    if target.startswith(_PREFIX):
        return _expression(target.removeprefix(_PREFIX))(linear)
    return target in (CLASS, linear) or linear.endswith(f".{target}") or fnmatch.fnmatchcase(linear, target)


@lru_cache(maxsize=256)
def _expression(pattern: str) -> Callable[[str], bool]:
    if len(pattern) > MAX_EXPRESSION_CHARS:
        raise ModelError(
            f"quantization_config names layers by {len(pattern)} characters, {shown(pattern)}; shorten it."
        )
    from pydantic import PydanticUserError, StringConstraints, TypeAdapter, ValidationError
    from pydantic_core import SchemaError

    try:
        adapter = TypeAdapter(Annotated[str, StringConstraints(pattern=f"^(?:{pattern})")])
    except (SchemaError, PydanticUserError):
        raise ModelError(
            f"quantization_config names layers by {shown(_PREFIX + pattern)}, which is not a regular expression "
            "without look-around and back-references; write the layers' names there."
        ) from None

    def matches(name: str) -> bool:
        try:
            adapter.validate_python(name)
        except ValidationError:
            return False
        return True

    return matches
