"""Imported by every Python process whose PYTHONPATH has this folder: writes down who is asked for over the network.

Each line of the file that WATCHED_SOCKETS names is an address outside of this machine. Sockets that libraries open
below Python are not seen.
"""

import ipaddress
import os
import sys
from typing import Any

LOG = os.environ.get("WATCHED_SOCKETS")


def _is_outside(host: Any) -> bool:
    text = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    if text in ("", "None", "localhost"):
        return False
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return True  # a name that has to be looked up
    return not (address.is_loopback or address.is_unspecified)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a Unix socket has a path
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if host is not None and _is_outside(host):
        with open(LOG, "a", encoding="utf-8") as log:  # type: ignore[arg-type]
            log.write(f"{event} {host} {sys.argv}\n")


if LOG:
    sys.addaudithook(_watch)
