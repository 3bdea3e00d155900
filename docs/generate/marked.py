"""Pages that people write but for the text between two marks, which a script makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def replace_between(text: str, begin: str, end: str, content: str) -> str:
    """The text with `content`, which brings its own line ends, between the two marks. Raises ValueError without them."""
    before, rest = text.split(begin)
    return f"{before}{begin}{content}{end}{rest.split(end)[1]}"


def refresh(documents: Iterable[Path], written: Callable[[str], str], module: str) -> None:
    """Write what `written` makes of each page; with `--check` on the command line only say which page is stale."""
    for document in documents:
        text = document.read_text("utf-8")
        if "--check" not in sys.argv[1:]:
            document.write_text(written(text), "utf-8")
        elif written(text) != text:
            sys.exit(f"{document} is stale: python -m {module}")
