"""The middleware that decides who may ask and how much, only by `scope["path"]` and headers, denying by default.

If the server has keys, only the health routes are open without one, and a key allows the routes of its scopes
(access/scopes.py). It is sent as `Authorization: Bearer KEY`, as `x-api-key: KEY` by Anthropic's clients, or,
so that a browser can open the console, as the password of HTTP Basic. Keys are compared in constant time.

A page of another site can reach a server on the reader's own machine: after the page was loaded, its name is changed to
point to 127.0.0.1 (DNS rebinding), and the browser then considers the server a part of that site. Such a request has
the site's name in `Host`. So a server that listens only on this machine and has no key answers only to the names of
this machine. `--allowed-host` adds names, and makes any server check them. A request that changes something and comes
from a page must come from a page of the server itself. Browsers say so themselves (`Sec-Fetch-Site`), except to servers
that they reach by plain HTTP over a network. Otherwise scheme, host and port of `Origin` must be those of the request.
A proxy that adds TLS tells its scheme by `X-Forwarded-Proto`, which no page can set for another site, or its name is
one of `--allowed-host`.

The tenant of a request, for which the engine shares its time and keeps cached prompts separate, is that of the API key
or, on a server without keys, the address of the connection. Nothing inside a request counts, such as OpenAI's `user` or
a forwarding header: a client that could choose its tenant could take several tenants' shares, or learn another tenant's
prompts from response times. So all clients behind one proxy are one tenant, and so are the keys of one tenant. For an
IPv6 address the network counts, because its owner has all addresses in it.
"""

import base64
import binascii
import hashlib
import ipaddress
import logging
import os
import re
import secrets
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8serve import logs
from fp8serve.server.access.keys import ANONYMOUS, SCOPES, Caller, KeyFile
from fp8serve.server.access.limits import TenantLimiter, TenantRequest
from fp8serve.server.access.scopes import generates, opens
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.scope import OPEN_PATHS, header, refuse
from fp8serve.server.settings import Settings, is_loopback

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
DEFAULT_PORTS = {"http": 80, "https": 443}
_PLACE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")


class Hosts:
    """See the module. Decides on headers and nothing else."""

    def __init__(self, settings: Settings) -> None:
        self._added = frozenset(map(_plain, settings.allowed_hosts))
        checks = bool(self._added) or (not settings.asks_for_keys and is_loopback(settings.host))
        self._known = LOCAL_NAMES | {_plain(settings.host)} | self._added if checks else None

    def knows(self, scope: Scope) -> bool:
        """Whether the request asks for a name of this server."""
        return self._known is None or _name(_header(scope, b"host")) in self._known

    def is_own_page(self, scope: Scope) -> bool:
        """Whether the request comes from a page of this server, or from no page."""
        if site := _header(scope, b"sec-fetch-site"):
            return site in ("same-origin", "none")
        origin = _header(scope, b"origin").lower()
        if not origin:
            return True
        scheme, _, place = origin.partition("://")
        if scheme not in DEFAULT_PORTS or not (name := _name(place)):
            return False
        forwarded = _header(scope, b"x-forwarded-proto").partition(",")[0].strip().lower()
        own = _origin(forwarded or scope["scheme"], _header(scope, b"host"))
        return name in self._added or _origin(scheme, place) == own


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _origin(scheme: str, place: str) -> tuple[str, str, int | None]:
    """Scheme, host and port; `place`: a host, which a port may follow."""
    match = _PLACE.fullmatch(place)
    return scheme, _name(place), int(match[2] or 0) if match and match[2] else DEFAULT_PORTS.get(scheme)


def _name(place: str) -> str:
    """`localhost` for `localhost:8000`; empty for an invalid address."""
    match = _PLACE.fullmatch(place)
    return _plain(match[1]) if match else ""


def _plain(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


log = logging.getLogger("fp8serve.server")
SECRET_BYTES = 32


class TenantNames:
    """Names made with a secret: they reveal nothing about keys, and cannot be made without the secret.

    A prefix cache that is kept across restarts is found by these names, so the secret is kept beside it, in the first
    `cache_dir` of the server's models. Without a `cache_dir`, only this process has the secret.
    """

    def __init__(self, settings: Settings) -> None:
        folders = (settings.cache_dir, *(model.options.get("cache_dir") for model in settings.models))
        folder = next((Path(name) for name in folders if name), None)
        self._secret = secrets.token_bytes(SECRET_BYTES) if folder is None else _stored_secret(folder)

    def name(self, scope: Scope, named: str | None) -> str:
        """The tenant of a request whose key belongs to the tenant `named`, or that needed no key."""
        who = f"named:{named}" if named is not None else f"from:{_network(scope)}"
        return hashlib.blake2b(who.encode(), key=self._secret, digest_size=16).hexdigest()


def _stored_secret(folder: Path) -> bytes:
    """The secret of a directory, which the first server that needs it creates; a new one if none can be kept."""
    new, path = secrets.token_bytes(SECRET_BYTES), folder / "tenants.secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write(path, new)
        if len(secret := path.read_bytes()) == SECRET_BYTES:
            return secret
        problem = f"it has {len(secret)} bytes, and not {SECRET_BYTES}"
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


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AccessControl:
    """See the module. Handlers find the caller in `scope["caller"]`, and its name for the engine in
    `scope["tenant"]`."""

    def __init__(self, app: ASGIApp, settings: Settings, keys: KeyFile) -> None:
        self.app = app
        self._keys = keys
        self._hosts = Hosts(settings)
        self._tenants = TenantNames(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there is no websocket here
            return await send({"type": "websocket.close", "code": 1008})
        caller = self._caller(scope)
        if (fault := self._verdict(scope, caller)) is not None:
            return await refuse(fault, scope, receive, send, close=True)
        scope["caller"] = caller
        if caller is not None:
            logs.bind(tenant=caller.tenant)
        named = caller.tenant if caller is not None and self._keys.needed else None
        scope["tenant"] = self._tenants.name(scope, named)
        return await self.app(scope, receive, send)

    def _verdict(self, scope: Scope, caller: Caller | None) -> Fault | None:
        if scope["path"] not in OPEN_PATHS and (fault := self._stranger(scope, caller)) is not None:
            return fault
        if scope["method"] not in SAFE_METHODS and not self._hosts.is_own_page(scope):
            return Fault(Code.FORBIDDEN, "A page of another site may not use this server.")
        return None

    def _stranger(self, scope: Scope, caller: Caller | None) -> Fault | None:
        if not self._hosts.knows(scope):
            hint = "Ask for localhost, or start the server with --allowed-host NAME."
            return Fault(Code.FORBIDDEN, "This server does not answer to the name in the Host header.", hint=hint)
        if caller is None:
            return Fault(
                Code.INVALID_API_KEY,
                "This server needs an API key, and the one given is missing or wrong.",
                hint="Send it as: Authorization: Bearer KEY, or x-api-key: KEY.",
            )
        if not opens(caller.scopes, scope):
            message = f"This API key is for {', '.join(caller.scopes)}, and that does not open this route."
            return Fault(Code.FORBIDDEN, message, hint="Check the path, or ask the operator for another key.")
        return None

    def _caller(self, scope: Scope) -> Caller | None:
        if not self._keys.needed:
            return _ANYONE
        return self._keys.current().caller(key_of(scope))


_ANYONE = Caller(ANONYMOUS, ANONYMOUS, SCOPES)


def key_of(scope: Scope) -> bytes:
    """The key of a request, empty when there is none. `Authorization` counts if there are both headers."""
    authorization = header(scope, b"authorization")
    return (header(scope, b"x-api-key") or b"").strip() if authorization is None else presented_key(authorization)


def presented_key(authorization: bytes) -> bytes:
    """The key inside an Authorization header, empty when there is none."""
    scheme, _, value = authorization.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class RateLimits:
    """The middleware that enforces the limits of tenants (access/limits.py) on the routes of the scope `generate`.

    Handlers find the request in `scope["tenant_request"]`. Every answer has the tenant's bounds in its headers.
    """

    def __init__(self, app: ASGIApp, tenants: TenantLimiter) -> None:
        self.app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not generates(scope):
            return await self.app(scope, receive, send)
        tenant_request = self._tenants.request(scope["caller"], scope["usage"])
        answer = _answer(tenant_request, send)
        try:
            tenant_request.enter()
        except Fault as fault:
            return await refuse(fault, scope, receive, answer, close=True)
        scope["tenant_request"] = tenant_request
        try:
            await self.app(scope, receive, answer)
        finally:
            tenant_request.leave()


def _answer(tenant_request: TenantRequest, send: Send) -> Send:
    """`send` that adds the headers."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            bounds = [(name.encode(), value.encode()) for name, value in tenant_request.headers().items()]
            message = {**message, "headers": [*message.get("headers", []), *bounds]}
        await send(message)

    return sent
