"""Names of tenants for the engine, which shares its time fairly among them and keeps their cached prompts separate.

The tenant is that of the API key or, on a server without keys, the address of the connection. Nothing inside a
request counts, such as OpenAI's `user` or a forwarding header: a client that could choose its tenant could have the
share of many, or find out by the time of an answer what another has asked. So all clients behind one proxy are one
tenant, and so are the keys of one tenant; the engine shares a tenant's time among its requests. For an IPv6 address
the network counts, because its owner has all addresses in it.
"""

import hashlib
import ipaddress
import logging
import os
import secrets
from pathlib import Path

from starlette.types import Scope

from fp8serve.server.settings import Settings

log = logging.getLogger("fp8serve.server")
SECRET_BYTES = 32


class Tenants:
    """Names made with a secret: they reveal nothing about keys, and cannot be made without the secret.

    A prefix cache that is kept across restarts is found by these names, so the secret is kept beside it, in the first
    `cache_dir` of the server's models. Without a `cache_dir`, only this process has the secret.
    """

    def __init__(self, settings: Settings) -> None:
        folders = (settings.cache_dir, *(model.options.get("cache_dir") for model in settings.models))
        folder = next((Path(name) for name in folders if name), None)
        self._secret = secrets.token_bytes(SECRET_BYTES) if folder is None else _kept(folder)

    def name(self, scope: Scope, named: str | None) -> str:
        """The tenant of a request whose key belongs to the tenant `named`, or that needed no key."""
        who = f"named:{named}" if named is not None else f"from:{_network(scope)}"
        return hashlib.blake2b(who.encode(), key=self._secret, digest_size=16).hexdigest()


def _kept(folder: Path) -> bytes:
    """The secret of a directory, which the first server that needs it creates; a new one if none can be kept."""
    new, path = secrets.token_bytes(SECRET_BYTES), folder / "tenants.secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write(path, new)
        if len(found := path.read_bytes()) == SECRET_BYTES:
            return found
        problem = f"it has {len(found)} bytes, and not {SECRET_BYTES}"
    except OSError as error:
        problem = str(error)
    log.warning("Prefixes of an earlier process will not be found: %s cannot be used: %s", path, problem)
    return new


def _write(path: Path, secret: bytes) -> None:
    """Writes the secret whole or not at all; of two servers that write at the same time, the first one's counts."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secret)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _network(scope: Scope) -> str:
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a Unix socket, or a test
        return str(host)
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))
