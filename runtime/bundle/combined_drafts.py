"""Two drafts of a bundle under one name: `prompt-lookup+NAME` copies what followed the last tokens before, and where they are
new asks the draft NAME. `memory+NAME` proposes how earlier answers went on, `grammar+NAME` what the request's grammar forces,
and else they ask NAME, which may be a combination itself. No bundle lists them; every one that has both drafts has them."""

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


def of_requests(name: str) -> DraftInfo | None:
    """The draft called `name` that every bundle has and none lists; None where there is no such kind."""
    from .draft_info import DraftInfo

    kind = draft_kinds().get(name)
    return None if kind is None or kind.of_requests is None else DraftInfo(name=name, kind=name)


def kinds_of_requests() -> list[str]:
    """Drafts that every bundle has, in the order in which they are asked."""
    places = {kind.name: kind.of_requests for kind in draft_kinds().values() if kind.of_requests is not None}
    return sorted(places, key=places.__getitem__)


def seconds(drafts: Sequence[DraftInfo]) -> list[DraftInfo]:
    """The drafts that may come second: those that do not draft on the target's own layers."""
    return [draft for draft in drafts if draft.layer is None and not comes_first(draft)]


def parts_of(drafts: Sequence[DraftInfo], name: str) -> tuple[DraftInfo, DraftInfo] | None:
    """The first and the second draft of the combination called `name`; None where there is none, or a draft has that
    name."""
    first, _, second = name.partition(SIGN)
    if any(draft.name == name for draft in drafts):
        return None
    asked = of_requests(first)
    if asked is not None:
        # Behind it whatever does not draft on the target's own layers, combinations included.
        found = next((draft for draft in drafts if draft.name == second), None)
        found = found or combination(drafts, second) or (of_requests(second) if second != first else None)
        return None if found is None or found.layer is not None else (asked, found)
    own = next((draft for draft in drafts if draft.name == first and comes_first(draft)), None)
    behind = next((draft for draft in seconds(drafts) if draft.name == second), None)
    return None if own is None or behind is None else (own, behind)


def combination(drafts: Sequence[DraftInfo], name: str) -> DraftInfo | None:
    """The combination called `name`: its second draft under that name; None where there is none."""
    parts = parts_of(drafts, name)
    return None if parts is None else replace(parts[1], name=name)


def combinations(drafts: Sequence[DraftInfo]) -> dict[str, str]:
    """Name of every combination of listed drafts → name of its second draft."""
    firsts = [draft.name for draft in drafts if comes_first(draft)]
    return {f"{first}{SIGN}{second.name}": second.name for first in firsts for second in seconds(drafts)}


def behind_requests(drafts: Sequence[DraftInfo]) -> dict[str, str | None]:
    """Name of every draft of requests, and of its combinations → the listed draft that runs in some of its cycles, or
    None."""
    names = {draft.name: draft.name for draft in drafts if draft.layer is None} | combinations(drafts)
    behind: dict[str, str | None] = {}
    for first in reversed(kinds_of_requests()):
        behind |= {f"{first}{SIGN}{name}": last for name, last in (names | behind).items()}
        behind[first] = None
    return behind


def before(drafts: Sequence[DraftInfo], first: str, draft: DraftInfo | None) -> DraftInfo:
    """The draft of requests called `first` before `draft`, or alone where there is none. Raises `OptionError` for one
    that nothing can be asked before."""
    alone = of_requests(first)
    assert alone is not None, f"{first} is no draft of requests"
    if draft is None:
        return alone
    both = combination(drafts, f"{first}{SIGN}{draft.name}")
    if both is None:
        raise OptionError(
            f"{first}: {draft.name} drafts on the target's own layers, and nothing can be asked before it; choose another "
            "draft, or none by leaving `draft` out"
        )
    return both


def no_combination(drafts: Sequence[DraftInfo], name: str) -> OptionError:
    """The error for a name with the sign that is none."""
    known = ", ".join(combinations(drafts)) or "none"
    return OptionError(f"draft: the bundle has no {name!r:.80}; of combinations it has {known}")
