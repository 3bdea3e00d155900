"""Small pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """A text with code in backticks, as one line that stands in a table."""
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:  # a lone backtick
        parts = ["'".join(parts)]
    plain = [part if n % 2 else _escaped(part) for n, part in enumerate(parts)]
    return "`".join(plain).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("[", "&#91;").replace("*", "&#42;")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown already."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def code(text: str) -> str:
    """Code in a table: with an entity for the bar, which no backslash hides there."""
    return f"<code>{_escaped(text).replace('|', '&#124;')}</code>"
