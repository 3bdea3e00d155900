"""Two drafts of a bundle under one name: `prompt-lookup+NAME` copies what followed the last tokens before, and where they are
new asks the draft NAME. No bundle lists it; every one that has both drafts has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..common.errors import OptionError
from ..graphs.registry import draft_kinds

if TYPE_CHECKING:
    from .manifest import DraftInfo

SIGN = "+"


def comes_first(draft: DraftInfo) -> bool:
    """Whether a draft may be asked before another one."""
    kind = draft_kinds().get(draft.kind)
    return kind is not None and kind.propose_first is not None


def seconds(drafts: Sequence[DraftInfo]) -> list[DraftInfo]:
    """The drafts that may come second: those that do not draft on the target's own layers."""
    return [draft for draft in drafts if draft.layer is None and not comes_first(draft)]


def second_of(drafts: Sequence[DraftInfo], name: str) -> DraftInfo | None:
    """The second draft of the combination called `name`; None where there is no such combination, or a draft has that
    name."""
    first, _, second = name.partition(SIGN)
    if any(draft.name == name for draft in drafts):
        return None
    if not any(draft.name == first and comes_first(draft) for draft in drafts):
        return None
    return next((draft for draft in seconds(drafts) if draft.name == second), None)


def combination(drafts: Sequence[DraftInfo], name: str) -> DraftInfo | None:
    """The combination called `name`: its second draft under that name; None where there is none."""
    second = second_of(drafts, name)
    return None if second is None else replace(second, name=name)


def combinations(drafts: Sequence[DraftInfo]) -> dict[str, str]:
    """Name of every combination → name of its second draft."""
    firsts = [draft.name for draft in drafts if comes_first(draft)]
    return {f"{first}{SIGN}{second.name}": second.name for first in firsts for second in seconds(drafts)}


def no_combination(drafts: Sequence[DraftInfo], name: str) -> OptionError:
    """The error for a name with the sign that is none."""
    known = ", ".join(combinations(drafts)) or "none"
    return OptionError(f"draft: the bundle has no {name!r:.80}; of combinations it has {known}")
