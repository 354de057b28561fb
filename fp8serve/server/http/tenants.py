"""Who asks, as the engine is told: a name for sharing its time fairly and for keeping cached prompts apart.

A tenant is that of the API key, or, where none is asked for, the address a connection comes from. Nothing inside a
request counts, such as OpenAI's `user` or a forwarding header: whoever could choose a tenant could have the share of
many, or find out by the time of an answer what another has asked. So everyone behind one proxy is one, and so are the
keys of one tenant; the engine shares a tenant's time among its requests. Of an IPv6 address the network counts: its
owner has all the rest.
"""

import hashlib
import ipaddress
import secrets

from starlette.types import Scope

_SECRET = secrets.token_bytes(32)  # they say nothing about keys, and none can be made outside this process


def tenant_of(scope: Scope, name: str | None) -> str:
    """The tenant of a request whose key is of the tenant `name`, or that needed none."""
    who = f"named:{name}" if name is not None else f"from:{_network(scope)}"
    return hashlib.blake2b(who.encode(), key=_SECRET, digest_size=16).hexdigest()


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
