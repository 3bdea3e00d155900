"""Drafts that are searched out of what a target has, in place of being trained: one file per kind.

A new kind is a file with a function `search(target, records, held, options, out, report)` that writes the draft's folder,
and one line in `KINDS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...runtime.common.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS: dict[str, str] = {"draft-and-verify": "draft_and_verify"}
"""Kind → module."""


def search_of(kind: str) -> Callable[..., Any]:
    """The search for drafts of a kind. OptionError for one that is not searched."""
    if kind not in KINDS:
        raise OptionError(f"--draft {kind!r:.80} is not searched; this version searches: {', '.join(KINDS)}")
    return import_module(f".{KINDS[kind]}", __name__).search
