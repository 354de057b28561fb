"""The middleware that authorizes requests and applies the limits of tenants. It denies by default.

**Keys.** If the server has API keys, only the health routes (with `--metrics-without-key` also /metrics, which then has
no series about tenants) are open without a key, and a key opens the routes of its scopes (access/scopes.py). Clients
send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY` like Anthropic's clients. Browsers send it as the
password of HTTP Basic. Keys are compared in constant time.

**Other sites.** A page of another site can reach a server on the user's machine by DNS rebinding: the site's name is
changed to point to 127.0.0.1 after the page has loaded. The requests of such a page have the site's name in `Host`. So
a server that listens only on this machine and has no key accepts only names of this machine in `Host`. `--allowed-host`
adds names, and makes every server check `Host`. A request that changes something must not come from a page of another
site. Browsers report this in `Sec-Fetch-Site`, but not to servers that they reach by plain HTTP over a network. Without
that header, scheme, host and port of `Origin` must be those of the request. Behind a proxy that adds TLS, the scheme is
that in the proxy's `X-Forwarded-Proto`, which a page of another site cannot set. Otherwise `--allowed-host` must name
the proxy.

**Tenants.** The engine shares its time between tenants and keeps their cached prompts separate. The tenant of a request
is that of its API key or, on a server without keys, the address of the connection. OpenAI's `user` and forwarding
headers do not count: a client that chose its tenant could take several shares, or learn another tenant's prompts from
response times. So all clients behind one proxy are one tenant. For an IPv6 address, the tenant is the /64 network,
because its owner can use every address in it.
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
from fp8serve.server.access.keys import ANONYMOUS, SCOPES, Caller, ServerKeys
from fp8serve.server.access.limits import TenantLimiter, TenantRequest
from fp8serve.server.access.scopes import has_tenant_limits, opens
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.scope import OPEN_PATHS, header, refuse
from fp8serve.server.settings import Settings, is_loopback

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
DEFAULT_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")


class HostCheck:
    """Checks the headers `Host`, `Origin` and `Sec-Fetch-Site` of requests."""

    def __init__(self, settings: Settings, keys: ServerKeys) -> None:
        self._allowed_hosts = frozenset(map(_normalize, settings.allowed_hosts))
        self._known = LOCAL_NAMES | {_normalize(settings.host)} | self._allowed_hosts
        self._is_local, self._keys = is_loopback(settings.host), keys

    def is_known_host(self, scope: Scope) -> bool:
        """Whether `Host` is a name of this server, or is not checked."""
        is_checked = bool(self._allowed_hosts) or (self._is_local and not self._keys.is_required)
        return not is_checked or _host_name(_header(scope, b"host")) in self._known

    def is_own_page(self, scope: Scope) -> bool:
        """Whether the request comes from a page of this server, or not from a page at all."""
        if site := _header(scope, b"sec-fetch-site"):
            return site in ("same-origin", "none")
        origin = _header(scope, b"origin").lower()
        if not origin:
            return True
        scheme, _, authority = origin.partition("://")
        if scheme not in DEFAULT_PORTS or not (name := _host_name(authority)):
            return False
        forwarded = _header(scope, b"x-forwarded-proto").partition(",")[0].strip().lower()
        expected = _origin(forwarded or scope["scheme"], _header(scope, b"host"))
        return name in self._allowed_hosts or _origin(scheme, authority) == expected


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _origin(scheme: str, authority: str) -> tuple[str, str, int | None]:
    """Returns scheme, host and port. `authority` is a host with or without a port."""
    match = _AUTHORITY.fullmatch(authority)
    return scheme, _host_name(authority), int(match[2] or 0) if match and match[2] else DEFAULT_PORTS.get(scheme)


def _host_name(authority: str) -> str:
    """Returns `localhost` for `localhost:8000`, and an empty string for an invalid address."""
    match = _AUTHORITY.fullmatch(authority)
    return _normalize(match[1]) if match else ""


def _normalize(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


log = logging.getLogger("fp8serve.server")
SECRET_BYTES = 32


class TenantNames:
    """Creates the names that tenants have in the engine: keyed hashes, which nobody can guess without the secret.

    Saved prefix caches are stored under these names, so the secret is stored beside them, in the first `cache_dir` of
    the server's models. Without a `cache_dir`, each server process has a secret of its own.
    """

    def __init__(self, settings: Settings) -> None:
        folders = (settings.cache_dir, *(model.options.get("cache_dir") for model in settings.models))
        folder = next((Path(name) for name in folders if name), None)
        self._secret = secrets.token_bytes(SECRET_BYTES) if folder is None else _stored_secret(folder)

    def name(self, scope: Scope, tenant: str | None) -> str:
        """Returns the name of `tenant`, or of the connection's address if `tenant` is None."""
        identity = f"named:{tenant}" if tenant is not None else f"from:{_network(scope)}"
        return hashlib.blake2b(identity.encode(), key=self._secret, digest_size=16).hexdigest()


def _stored_secret(folder: Path) -> bytes:
    """Returns the secret that is stored in `folder`, or stores and returns a new one.

    If it cannot be stored, a warning is logged and the secret is lost when the process ends.
    """
    new, path = secrets.token_bytes(SECRET_BYTES), folder / "tenants.secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write(path, new)
        if len(secret := path.read_bytes()) == SECRET_BYTES:
            return secret
        problem = f"it has {len(secret)} bytes instead of {SECRET_BYTES}"
    except OSError as error:
        problem = str(error)
    log.warning("prefix caches of earlier processes are not reused, because %s cannot be used: %s", path, problem)
    return new


def _write(path: Path, secret: bytes) -> None:
    """Writes the secret atomically. If two servers write at the same time, the first one's secret is kept."""
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
UNSAFE_PATHS = frozenset({"/flush_cache"})  # which SGLang's trainers call with GET
METRICS_PATH = "/metrics"


class AccessControl:
    """The middleware that refuses unauthorized requests.

    It stores the caller in `scope["caller"]` and the tenant's name for the engine in `scope["tenant"]`.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keys: ServerKeys) -> None:
        self.app = app
        self._keys = keys
        self._hosts = HostCheck(settings, keys)
        self._tenants = TenantNames(settings)
        self._open_paths = OPEN_PATHS | ({METRICS_PATH} if settings.metrics_without_key else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # the server has no websockets
            return await send({"type": "websocket.close", "code": 1008})
        is_anonymous = not self._keys.is_required
        caller = _ANONYMOUS_CALLER if is_anonymous else self._keys.current_keys().caller(key_of(scope))
        if (fault := self._refusal(scope, caller)) is not None:
            return await refuse(fault, scope, receive, send, close=True)
        scope["caller"] = caller
        if caller is not None:
            logs.bind(tenant=caller.tenant)
        tenant = None if caller is None or is_anonymous else caller.tenant
        scope["tenant"] = self._tenants.name(scope, tenant)
        return await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, caller: Caller | None) -> Fault | None:
        if scope["path"] not in OPEN_PATHS and not self._hosts.is_known_host(scope):
            hint = "Use the name localhost, or start the server with --allowed-host NAME."
            return Fault(Code.FORBIDDEN, "This server does not answer to the name in the Host header.", hint=hint)
        if scope["path"] not in self._open_paths and (fault := self._authorization_fault(scope, caller)) is not None:
            return fault
        is_safe = scope["method"] in SAFE_METHODS and scope["path"] not in UNSAFE_PATHS
        if not is_safe and not self._hosts.is_own_page(scope):
            return Fault(Code.FORBIDDEN, "Pages of other sites may not use this server.")
        return None

    def _authorization_fault(self, scope: Scope, caller: Caller | None) -> Fault | None:
        if caller is None:
            return Fault(
                Code.INVALID_API_KEY,
                "This server requires an API key, and the request has none or a wrong one.",
                hint="Send it as: Authorization: Bearer KEY, or x-api-key: KEY.",
            )
        if not opens(caller.scopes, scope):
            message = f"The scopes of this API key ({', '.join(caller.scopes)}) do not open this route."
            return Fault(Code.FORBIDDEN, message, hint="Check the path, or ask the operator for another key.")
        return None


_ANONYMOUS_CALLER = Caller(ANONYMOUS, ANONYMOUS, SCOPES)


def key_of(scope: Scope) -> bytes:
    """Returns the key of a request, or b"" if it has none. `Authorization` takes precedence over `x-api-key`."""
    authorization = header(scope, b"authorization")
    return (header(scope, b"x-api-key") or b"").strip() if authorization is None else presented_key(authorization)


def presented_key(authorization: bytes) -> bytes:
    """Returns the key in an Authorization header, or b"" if there is none."""
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

    It stores the TenantRequest in `scope["tenant_request"]` and adds the tenant's limits to the response's headers.
    """

    def __init__(self, app: ASGIApp, tenants: TenantLimiter) -> None:
        self.app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_tenant_limits(scope):
            return await self.app(scope, receive, send)
        tenant_request = self._tenants.create_request(scope["caller"], scope["usage"])
        send_with_limits = _with_limit_headers(tenant_request, send)
        try:
            tenant_request.begin()
        except Fault as fault:
            return await refuse(fault, scope, receive, send_with_limits, close=True)
        scope["tenant_request"] = tenant_request
        try:
            await self.app(scope, receive, send_with_limits)
        finally:
            tenant_request.end()


def _with_limit_headers(tenant_request: TenantRequest, send: Send) -> Send:
    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            limits = [(name.encode(), value.encode()) for name, value in tenant_request.headers().items()]
            message = {**message, "headers": [*message.get("headers", []), *limits]}
        await send(message)

    return send_with_limits
