"""Logs every address outside of this machine that a Python process resolves or connects to.

Python imports this module at the start of every process whose PYTHONPATH has this folder. The environment variable
WATCHED_SOCKETS names the log file, with one line for each access. Native libraries that open sockets without Python's
`socket` module are not logged.
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
        return True  # a host name
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
