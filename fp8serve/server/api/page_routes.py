"""The console and the documentation: plain files of this package under a strict content security policy.

They work offline and load nothing from elsewhere.
"""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(tags=["server"])
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/console/style.css": ("style.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
    "/console/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
}


def add_pages(router: APIRouter) -> None:
    """One route for each file; no path of a request ever names a file."""
    for path, (name, media_type) in PAGES.items():
        content = files("fp8serve.server").joinpath("console", name).read_bytes()
        router.add_api_route(path, _page(content, media_type), methods=["GET", "HEAD"], include_in_schema=False)


def _page(content: bytes, media_type: str):  # type: ignore[no-untyped-def]
    headers = {"Content-Security-Policy": CSP, "Cache-Control": "no-cache"}

    async def page() -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return page


add_pages(router)
