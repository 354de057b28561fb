"""The middleware that decides who may ask, only by `scope["path"]` and headers, denying by default.

If the server has keys, only the health routes are open without one, and a key allows the routes of its scopes
(access/scopes.py). It is sent as `Authorization: Bearer KEY`, as `x-api-key: KEY` by Anthropic's clients, or,
so that a browser can open the console, as the password of HTTP Basic. Keys are compared in constant time. A request to
a name that is not this server's is refused (hosts.py), and a browser that acts for another site (`Sec-Fetch-Site`,
`Origin`) may not change anything, with or without a key.
"""

import base64
import binascii

from starlette.types import ASGIApp, Receive, Scope, Send

from fp8serve import logs
from fp8serve.server.access.key_file import KeyFile
from fp8serve.server.access.keys import ANONYMOUS, SCOPES, Caller
from fp8serve.server.access.scopes import opens
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.hosts import Hosts
from fp8serve.server.http.scope import OPEN_PATHS, header, refuse
from fp8serve.server.http.tenants import Tenants
from fp8serve.server.settings import Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AccessControl:
    """See the module. Handlers find the caller in `scope["caller"]`, and its name for the engine in
    `scope["tenant"]`."""

    def __init__(self, app: ASGIApp, settings: Settings, keys: KeyFile) -> None:
        self.app = app
        self._keys = keys
        self._hosts = Hosts(settings)
        self._tenants = Tenants(settings)

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
