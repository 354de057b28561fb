"""The addresses that a job may send answers to: those that the operator named, and the paths below them.

Without this check, whoever may start a job could make its process send requests to any address that this machine can
reach.
"""

from collections.abc import Iterable
from urllib.parse import SplitResult

from fp8serve.errors import shown
from fp8serve.options import http_address
from fp8serve.server.faults import Code, Fault

PORTS = {"http": 80, "https": 443}


def check_grader(url: str | None, allowed: Iterable[str]) -> None:
    """Fault for an address that is not allowed. The message does not say which ones are."""
    if url is None:
        return
    if (address := http_address(url)) is None:
        message = f"grader_url must be an address such as http://localhost:9000/grade, not {shown(url)}."
        raise Fault(Code.INVALID_PARAMETER, message, param="grader_url")
    if not any(_is_below(address, known) for known in map(http_address, allowed) if known is not None):
        raise Fault(
            Code.INVALID_PARAMETER,
            "This server does not send answers to that address.",
            param="grader_url",
            hint="Its operator names those that it may ask with --grader-url.",
        )


def _is_below(url: SplitResult, known: SplitResult) -> bool:
    same = _place(url) == _place(known)
    root = known.path.rstrip("/")
    return same and "@" not in url.netloc and _is_plain(url.path) and f"{url.path}/".startswith(f"{root}/")


def _place(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port or PORTS.get(url.scheme)


def _is_plain(path: str) -> bool:
    """Whether the path means what it looks like: it holds no `..`, however that is encoded."""
    return "%" not in path and "\\" not in path and not {".", ".."} & set(path.split("/"))
