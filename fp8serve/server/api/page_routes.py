"""The console and the documentation: plain files of this package under a strict content security policy.

They work offline, load nothing from elsewhere, and need no build: the console consists of ES modules, served as they
are written. A browser asks again each time, and learns from the hash of a file's bytes that it already has it.
"""

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

router = APIRouter(tags=["server"])
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FOLDER = files("fp8serve.server").joinpath("console")
MEDIA_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
HTML = "text/html; charset=utf-8"
PARTS = sorted(item.name for item in FOLDER.iterdir() if item.name.rpartition(".")[2] in MEDIA_TYPES)
PAGES = {
    "/": ("index.html", HTML),
    "/docs": ("docs.html", HTML),
    **{f"/console/{name}": (name, MEDIA_TYPES[name.rpartition(".")[2]]) for name in PARTS},
}


def add_pages(router: APIRouter) -> None:
    """One route for each file; no path of a request ever names a file."""
    for path, (name, media_type) in PAGES.items():
        content = FOLDER.joinpath(name).read_bytes()
        router.add_api_route(path, _page(content, media_type), methods=["GET", "HEAD"], include_in_schema=False)


def _page(content: bytes, media_type: str):  # type: ignore[no-untyped-def]
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"Content-Security-Policy": CSP, "Cache-Control": "no-cache", "ETag": tag}

    async def page(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return page


@router.get("/console", include_in_schema=False)
def console() -> Response:
    return RedirectResponse("./")  # relative, because a proxy may put the server below a path


add_pages(router)
