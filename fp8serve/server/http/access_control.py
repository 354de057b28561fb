"""The middleware that decides who may ask: by `scope["path"]` and headers and nothing else, denying by default.

Only the health routes are open when a key is set. The key arrives as `Authorization: Bearer KEY`, as `x-api-key: KEY`,
as Anthropic's clients send it, or, so that a browser can open the console, as the password of HTTP Basic. Keys are
compared as bytes in constant time. A request by a name that is not this server's is refused (hosts.py), and a browser
that acts for another site (`Sec-Fetch-Site`, `Origin`) may not change anything, key or no key.
"""

import base64
import binascii
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.hosts import Hosts
from fp8serve.server.http.scope import OPEN_PATHS, header, refuse
from fp8serve.server.http.tenants import tenant_of
from fp8serve.server.settings import Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AccessControl:
    """See the module."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        self._hosts = Hosts(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there is no websocket here
            return await send({"type": "websocket.close", "code": 1008})
        if (fault := self._verdict(scope)) is not None:
            return await refuse(fault, scope, receive, send, close=True)
        scope["tenant"] = tenant_of(scope, self._key)
        return await self.app(scope, receive, send)

    def _verdict(self, scope: Scope) -> Fault | None:
        if scope["path"] not in OPEN_PATHS and not self._hosts.knows(scope):
            hint = "Ask for localhost, or start the server with --allowed-host NAME."
            return Fault(Code.FORBIDDEN, "This server does not answer to the name in the Host header.", hint=hint)
        if scope["path"] not in OPEN_PATHS and not self._authorised(scope):
            return Fault(
                Code.INVALID_API_KEY,
                "This server needs an API key, and the one given is missing or wrong.",
                hint="Send it as: Authorization: Bearer KEY, or x-api-key: KEY.",
            )
        foreign = header(scope, b"sec-fetch-site") in (b"cross-site", b"same-site") or not self._hosts.is_own_page(
            scope
        )
        if scope["method"] not in SAFE_METHODS and foreign:
            return Fault(Code.FORBIDDEN, "A page of another site may not use this server.")
        return None

    def _authorised(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        given = key_of(scope)
        return hmac.compare_digest(given, self._key)


def key_of(scope: Scope) -> bytes:
    """The key that a request carries, empty when there is none. `Authorization` counts where there are both headers."""
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
