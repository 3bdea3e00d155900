"""The page of the server: plain files, which a browser reads as they are."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

HEADERS = {
    # `data:` and `blob:` are pictures that somebody chose; nothing comes from another host, and nothing goes there.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; media-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a newer server's page must not run with an older one's modules
}


def page_routes() -> list[BaseRoute]:
    """The page at `/`, and what it is made of below `/static`."""
    files = [path for path in sorted(STATIC.iterdir()) if path.suffix in TYPES]
    return [_route("/" if path.name == "index.html" else f"/static/{path.name}", path) for path in files]


def _route(address: str, path: Path) -> BaseRoute:
    data, kind = path.read_bytes(), TYPES[path.suffix]

    async def show(request: Request) -> Response:
        return Response(data, headers=HEADERS, media_type=kind)

    return Route(address, show)
