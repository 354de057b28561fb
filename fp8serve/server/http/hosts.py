"""Which names this server answers to, and which pages may act on it.

A page of another site can reach a server on the reader's own machine: after the page was loaded, its name is changed to
point to 127.0.0.1 (DNS rebinding), and the browser then considers the server a part of that site. Such a request has
the site's name in `Host`. So a server that listens only on this machine and has no key answers only to the names of
this machine. `--allowed-host` adds names, and makes any server check them. A request that changes something and comes
from a page must come from a page of the server itself. Browsers say so themselves (`Sec-Fetch-Site`), except to servers
that they reach by plain HTTP over a network. Otherwise scheme, host and port of `Origin` must be those of the request.
A proxy that adds TLS tells its scheme by `X-Forwarded-Proto`, which no page can set for another site, or its name is
one of `--allowed-host`.
"""

import re

from starlette.types import Scope

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
    found = _PLACE.fullmatch(place)
    return scheme, _name(place), int(found[2] or 0) if found and found[2] else DEFAULT_PORTS.get(scheme)


def _name(place: str) -> str:
    """`localhost` for `localhost:8000`; empty for an invalid address."""
    found = _PLACE.fullmatch(place)
    return _plain(found[1]) if found else ""


def _plain(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()
