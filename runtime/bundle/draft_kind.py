"""What a draft kind declares, in its own folder of `runtime/drafts/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .draft_options import DraftOptions

if TYPE_CHECKING:
    from ..graphs.role import GraphRole
    from .draft_info import DraftInfo
    from .manifest import Manifest


Propose: TypeAlias = "Callable[[DraftInfo, Any], Any]"
"""(draft, `Decoder`) → `Proposer`. These types lie above the manifest, which knows the kinds."""


@dataclass(frozen=True)
class DraftKind:
    """A kind. `propose` makes the proposer of a draft, once per session; it imports what that needs when it is called."""

    name: str
    propose: Propose
    roles: tuple[GraphRole, ...] = ()
    """Of graphs that its drafts bring."""
    options: type[DraftOptions] = DraftOptions
    propose_first: Propose | None = None
    """The proposer of one that is asked before another draft (`combined_drafts.py`); None for kinds that are not."""
    of_requests: int | None = None
    """Of a kind whose one draft needs nothing of a bundle, and of a request the option of the kind's own name: every bundle has
    it, under its kind's name, and none lists it. The number is its place among such drafts: a lower one is asked first."""


def draft_with(manifest: Manifest, role: str, name: str | None = None) -> DraftInfo | None:
    """The draft that has a graph of this role, and, if given, of this name."""
    owners = (draft for draft in manifest.drafts if role in draft.graphs)
    return next((draft for draft in owners if name is None or draft.graphs[role] == name), None)
