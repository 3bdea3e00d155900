"""Every generated page: its path in docs/ and its text."""

from __future__ import annotations

from docs.generate import commands, formats, options, schemas, supported


def pages() -> dict[str, str]:
    """Path → Markdown."""
    return {**commands.pages(), **formats.pages(), **options.pages(), **schemas.pages(), **supported.pages()}
