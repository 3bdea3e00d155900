"""The page of the server."""

from __future__ import annotations

from starlette.routing import BaseRoute


def page_routes() -> list[BaseRoute]:
    """None yet."""
    return []
