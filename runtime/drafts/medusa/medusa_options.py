"""What the draft kind `medusa` says in a manifest, and what its graphs look like from outside."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...bundle.draft_kind import draft_with
from ...bundle.draft_options import DraftOptions, DraftPasses, DraftShares
from ...bundle.schema import checked, failure, integer, list_of, optional
from ...common.errors import BundleError
from ...graphs.role import TOKEN, VERIFY, GraphRole, Shape, Values
from ...graphs.values import hidden_states

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo, Manifest


@dataclass(kw_only=True)
class MedusaOptions(DraftOptions):
    """`heads` (most tokens that it looks ahead), `ranks` (proposals of each), `tree` (parents of the nodes of its static
    tree in its order of growth, −1 below the root)."""

    tree: list[int] | None = checked(optional(list_of(integer(-1, 4096), 4096)), default=None)
    heads: int | None = checked(optional(integer(1, 64)), default=None)
    ranks: int | None = checked(optional(integer(1, 64)), default=None)

    @property
    def most_tokens(self) -> int | None:
        return self.heads

    @property
    def offers_trees(self) -> bool:
        return self.ranks is not None

    @property
    def static_tree(self) -> Sequence[int] | None:
        return self.tree

    def check(self, where: str, draft: DraftInfo, manifest: Manifest) -> None:
        if self.tree is not None and any(not -1 <= p < max(i, 1) - (i == 0) for i, p in enumerate(self.tree)):
            raise failure(f"{where}.tree", self.tree, "a list of parents, each before its child")

    def passes(self, draft: DraftInfo, first: Sequence[str]) -> DraftPasses:
        """All heads at once, on the last hidden state."""
        return DraftPasses(once=() if self.heads is None else list(draft.graphs.values()))

    def usual_shares(self, manifest: Manifest, head: float) -> DraftShares | None:
        return None if self.heads is None else DraftShares(once=self.heads * head)


def _heads(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    draft = draft_with(manifest, "medusa")
    options = None if draft is None else draft.options
    if not isinstance(options, MedusaOptions) or options.heads is None or options.ranks is None:
        raise BundleError("manifest field 'drafts': no draft names heads and ranks of the graph 'medusa'")
    ranked: Shape = ("rows", options.heads, options.ranks)
    return (
        {"hidden": hidden_states(manifest), "row_index": ("int64", ("rows",))},
        {"token_ids": ("int64", ranked), "log_probabilities": ("float32", ranked)},
    )


HEADS = GraphRole("medusa", _heads, (TOKEN, VERIFY), timed=(TOKEN,))
