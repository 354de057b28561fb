"""The API keys of a server, and the TOML file of keys, which contains only their SHA-256:

    tenants.research = { requests_per_minute = 60, tokens_per_minute = 20000, concurrent_requests = 8 }
    keys.ci = { tenant = "research", scopes = ["generate"], sha256 = "9f86d0..." }

A key is a long random text (`new_key`), so one round of SHA-256 cannot be inverted by guessing. Keys of one tenant
share its part of the engine, its cached prompts and its limits. A tenant without a line has no limits. Other users must
not be able to access the file. Its group may read it, because Kubernetes mounts secrets in this way.

Servers that share a database accept the keys in it, too (finetuning/stored_keys.py).
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
"""The tenant of the key of `--api-key`, and the tenant on a server without keys."""
Limit = Annotated[int, Ge(1)] | None


@dataclass(frozen=True)
class TenantLimits:
    """The limits of all requests of a tenant together. None means that there is no limit."""

    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    concurrent_requests: Limit = None

    def __post_init__(self) -> None:
        check(self, RequestError)


@dataclass(frozen=True)
class Caller:
    """The caller of a request: the names of its key and of its tenant, the key's scopes and the tenant's limits."""

    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    limits: TenantLimits = field(default_factory=TenantLimits)


@dataclass(frozen=True)
class Key:
    """A key in the file."""

    tenant: str
    scopes: tuple[Scope, ...]
    sha256: str

    def __post_init__(self) -> None:
        check(self, RequestError)
        check_name("tenant", self.tenant)
        if not self.scopes:
            raise RequestError("scopes is empty, so the key would open no route.")
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise RequestError("sha256 must be 64 hexadecimal digits in lower case, as fp8serve key new prints them.")


@dataclass(frozen=True)
class Keys:
    """All keys of a server. `digests` maps the SHA-256 of a key to its caller."""

    digests: Mapping[bytes, Caller] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def caller(self, key: bytes) -> Caller | None:
        """Returns the caller with this key, or None. The time does not depend on the key."""
        digest, match = hashlib.sha256(key).digest(), None
        for key_digest, caller in self.digests.items():
            if hmac.compare_digest(key_digest, digest):
                match = caller
        return match


def admin_key(key: str) -> Keys:
    """Returns keys that contain only the key of `--api-key`, which has the scope `admin`."""
    return Keys({hashlib.sha256(key.encode()).digest(): Caller(DEFAULT, DEFAULT, ("admin",))})


def new_key() -> str:
    """Returns a new key of 256 random bits. Its prefix lets scanners find leaked keys."""
    return f"fp8serve-{secrets.token_urlsafe(32)}"


def create_entry(name: str, tenant: str, scopes: Sequence[str], key: str) -> Key:
    """Returns the entry of a key, which has only its hash. Raises RequestError for invalid names or scopes."""
    check_name("name", name)
    unique_scopes = tuple(dict.fromkeys(scopes))
    return Key(tenant, unique_scopes, hashlib.sha256(key.encode()).hexdigest())  # type: ignore[arg-type]  # Key checks the scopes


def format_key_line(name: str, tenant: str, scopes: Sequence[str], key: str) -> str:
    """Returns the line of a key in the file. Raises RequestError for invalid names or scopes."""
    entry = create_entry(name, tenant, scopes, key)
    quoted = ", ".join(f'"{scope}"' for scope in entry.scopes)
    return f'keys.{name} = {{ tenant = "{tenant}", scopes = [{quoted}], sha256 = "{entry.sha256}" }}'


def read_keys(path: Path) -> Keys:
    """Returns the keys of the file. Raises MachineError if the file cannot be used."""
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
        raise MachineError(f"The file of keys {path} is invalid: {error}") from None


def parse_keys(raw: bytes) -> Keys:
    """Returns the keys in the content of a file of keys. Raises RequestError if it is invalid."""
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise RequestError("it is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"it is not valid TOML; Python's reader says: {one_line(error)}.") from None
    if unknown := sorted(set(data) - {"keys", "tenants"}):
        raise RequestError(f"it has {unknown[0]!r}, but only keys and tenants are allowed.")
    limits = {name: _create(TenantLimits, "tenants", name, value) for name, value in _table(data, "tenants")}
    digests: dict[bytes, Caller] = {}
    for name, value in _table(data, "keys"):
        key = _create(Key, "keys", name, value)
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


def _create(kind: Any, table: str, name: str, value: Any) -> Any:
    check_name(table, name)
    try:
        values = known_fields(kind, value)
        if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]:
            raise RequestError(f"it lacks {missing[0]}.")
        return kind(**values)
    except RequestError as error:
        raise RequestError(f"{table}.{name}: {error}") from None


def check_name(what: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise RequestError(f"{what}: a name has 1 to 64 letters, digits, '-' and '_', unlike {name[:80]!r}.")


log = logging.getLogger("fp8serve.server")
FileStatus = tuple[int, ...] | None


class ServerKeys:
    """The keys that a server accepts: those of the file `path`, which is read again when it changes, the key of
    `--api-key`, and those of the database.

    Raises MachineError if the file cannot be used at the start. Later errors are logged, and the previous keys stay
    valid.
    """

    def __init__(self, path: Path | None, key: str | None, is_required: bool) -> None:
        self.path = path
        self.is_required = is_required  # whether a request must carry a key, as it must once the database had one
        self._admin_digests = admin_key(key).digests if key is not None else {}
        self._status = self._read_status()
        self._of_file = Keys() if path is None else read_keys(path)
        self._of_database = Keys()
        self._join()

    def current_keys(self) -> Keys:
        """Returns the keys, after reading the file again if it has changed."""
        if self.path is not None and (status := self._read_status()) != self._status:
            self._status = status
            self.reload()
        return self._keys

    def set_database_keys(self, keys: Keys | None) -> None:
        """Replaces the keys of the database. `keys` is None if it never had one."""
        if keys is not None:
            self.is_required = True
            self._of_database = keys
            self._join()

    def reload(self) -> None:
        """Reads the file, whether it has changed or not. SIGHUP calls this."""
        if self.path is None:
            return
        try:
            self._of_file = read_keys(self.path)
        except MachineError as error:
            log.error("%s The previous keys stay valid.", error)
        else:
            self._join()
            log.info("read %d API keys from %s", len(self._of_file.digests), self.path)

    def _join(self) -> None:
        self._keys = Keys({**self._of_database.digests, **self._of_file.digests, **self._admin_digests})

    def _read_status(self) -> FileStatus:
        if self.path is None:
            return None
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
