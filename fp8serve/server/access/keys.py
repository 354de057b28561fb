"""API keys in a TOML file, which holds only their SHA-256:

    tenants.research = { requests_per_minute = 60, tokens_per_minute = 20000, concurrent_requests = 8 }
    keys.ci = { tenant = "research", scopes = ["generate"], sha256 = "9f86d0..." }

A key is a long random text (`new_key`), so one round of SHA-256 cannot be undone by guessing. Keys of one tenant share
its part of the engine, its cached prompts and its limits; a tenant without a line has no limits. A file that others
may read or change would let them in or out; the group may read it, because that is how Kubernetes mounts a secret.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge

from fp8serve.errors import MachineError, RequestError, one_line
from fp8serve.options import check, known_fields

Scope = Literal["read", "generate", "finetune", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
DEFAULT, ANONYMOUS = "default", "anonymous"
"""The tenant of the one key of `--api-key`, and of a server that asks for no key."""
Bound = Annotated[int, Ge(1)] | None


@dataclass(frozen=True)
class TenantLimits:
    """The limits of all requests of a tenant together; None: no limit."""

    requests_per_minute: Bound = None
    tokens_per_minute: Bound = None
    concurrent_requests: Bound = None

    def __post_init__(self) -> None:
        check(self, RequestError)


@dataclass(frozen=True)
class Caller:
    """The caller: the name of the key, the name of its tenant, and its scopes."""

    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    limits: TenantLimits = field(default_factory=TenantLimits)


@dataclass(frozen=True)
class Key:
    """A key's line in the file."""

    tenant: str
    scopes: tuple[Scope, ...]
    sha256: str

    def __post_init__(self) -> None:
        check(self, RequestError)
        _check_name("tenant", self.tenant)
        if not self.scopes:
            raise RequestError("scopes is empty: the key could do nothing.")
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise RequestError("sha256 must be 64 hexadecimal digits in lower case, as fp8serve key new prints them.")


@dataclass(frozen=True)
class Keys:
    """All keys of a server. `digests`: the SHA-256 of a key, and its caller."""

    digests: Mapping[bytes, Caller] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def caller(self, key: bytes) -> Caller | None:
        """The caller with the key `key`. It takes the same time for every key, known or not."""
        digest, match = hashlib.sha256(key).digest(), None
        for known, caller in self.digests.items():
            if hmac.compare_digest(known, digest):
                match = caller
        return match


def single(key: str) -> Keys:
    """The one key of `--api-key`, which may do everything."""
    return Keys({hashlib.sha256(key.encode()).digest(): Caller(DEFAULT, DEFAULT, ("admin",))})


def new_key() -> str:
    """256 random bits, with a mark by which scanners for leaked secrets find it."""
    return f"fp8serve-{secrets.token_urlsafe(32)}"


def line_of(name: str, tenant: str, scopes: Sequence[str], key: str) -> str:
    """The line for the file. Raises RequestError."""
    _check_name("name", name)
    chosen = tuple(dict.fromkeys(scopes))
    entry = Key(tenant, chosen, hashlib.sha256(key.encode()).hexdigest())  # type: ignore[arg-type]  # which it checks
    listed = ", ".join(f'"{scope}"' for scope in entry.scopes)
    return f'keys.{name} = {{ tenant = "{tenant}", scopes = [{listed}], sha256 = "{entry.sha256}" }}'


def read_keys(path: Path) -> Keys:
    """The keys of the file. Raises MachineError with one sentence."""
    try:
        with path.open("rb") as file:
            mode, raw = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        raise MachineError(f"The file of keys {path} cannot be read: {error.strerror}.") from None
    if mode & 0o027:
        raise MachineError(
            f"Other users may read or change the file of keys {path} (mode {mode & 0o777:o}); run: chmod 600 {path}."
        )
    try:
        return parse_keys(raw)
    except RequestError as error:
        raise MachineError(f"The file of keys {path} is wrong: {error}") from None


def parse_keys(raw: bytes) -> Keys:
    """The keys of the text of a file. Raises RequestError."""
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise RequestError("it is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"it is not valid TOML; Python's reader says: {one_line(error)}.") from None
    if unknown := sorted(set(data) - {"keys", "tenants"}):
        raise RequestError(f"it has {unknown[0]!r}, and there can be only keys and tenants.")
    limits = {name: _built(TenantLimits, "tenants", name, value) for name, value in _table(data, "tenants")}
    digests: dict[bytes, Caller] = {}
    for name, value in _table(data, "keys"):
        key = _built(Key, "keys", name, value)
        digest = bytes.fromhex(key.sha256)
        if digest in digests:
            raise RequestError(f"keys.{name} and keys.{digests[digest].name} are the same key.")
        digests[digest] = Caller(name, key.tenant, key.scopes, limits.get(key.tenant, TenantLimits()))
    return Keys(MappingProxyType(digests))


def _table(data: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    table = data.get(name, {})
    if not isinstance(table, dict):
        raise RequestError(f"{name} must be a table, not {table!r}.")
    return list(table.items())


def _built(kind: Any, table: str, name: str, value: Any) -> Any:
    _check_name(table, name)
    try:
        values = known_fields(kind, value)
        if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]:
            raise RequestError(f"it lacks {missing[0]}.")
        return kind(**values)
    except RequestError as error:
        raise RequestError(f"{table}.{name}: {error}") from None


def _check_name(what: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise RequestError(f"{what}: a name has 1 to 64 letters, digits, '-' and '_', and {name[:80]!r} is none.")


log = logging.getLogger("fp8serve.server")
Mark = tuple[int, ...] | None


class KeyFile:
    """The keys of `path`, and the single `key`. Raises MachineError when the file cannot be used at the start."""

    def __init__(self, path: Path | None, key: str | None) -> None:
        self.path = path
        self._always = single(key).digests if key is not None else {}
        self._mark = self._look()
        self._keys = self._read()

    @property
    def needed(self) -> bool:
        """Whether a request must carry a key."""
        return self.path is not None or bool(self._always)

    def current(self) -> Keys:
        """The keys that the file has now."""
        if self.path is not None and (mark := self._look()) != self._mark:
            self._mark = mark
            self.reload()
        return self._keys

    def reload(self) -> None:
        """Reads the file whether it has changed or not, as SIGHUP asks."""
        try:
            self._keys = self._read()
        except MachineError as error:
            log.error("%s The keys that were read before stay in force.", error)
        else:
            log.info("read %d keys from %s", len(self._keys.digests) - len(self._always), self.path)

    def _read(self) -> Keys:
        if self.path is None:
            return Keys(self._always)
        return Keys({**read_keys(self.path).digests, **self._always})

    def _look(self) -> Mark:
        if self.path is None:
            return None
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
