"""Proposers: one file per draft kind. `create` builds one from a bundle's draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import BundleError

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo
    from ..speculate.proposer import Proposer


def create(draft: DraftInfo, cuts: Sequence[int], pick: Callable[[Any], int] | None = None) -> Proposer:
    """The proposer of a draft. Raises `BundleError` for a kind that this version does not know."""
    if draft.kind in ("early-exit", "imitation"):
        from .self_draft import SelfDraft

        return SelfDraft(draft, cuts, pick)
    raise BundleError(
        f"draft {draft.name!r} is of kind {draft.kind!r}, which this vlmexport cannot run; upgrade it"
    )


@contextmanager
def always_wrong(session: Any) -> Iterator[None]:
    """While active, self-drafts of `session` propose their least likely token: output must not change."""
    session.draft_pick = lambda logits: int(logits.argmin())
    try:
        yield
    finally:
        session.draft_pick = None
