"""The controller of a session: it decides from a stored table and what it has seen, never from the clock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..bundle.stored_acceptance import measured_chains, measured_trees
from ..bundle.stored_costs import pick_costs, with_drafts_of_requests
from ..policy.adaptive import Adaptive
from ..speedup.budget import Budget

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest


def make_controller(
    manifest: Manifest, machine: str, threads: int, learn: str, threshold: float | None, least: int = 1
) -> Adaptive:
    """A controller for a bundle on this machine; `learn` and `threshold` as `Settings` of a request choose them. No pass
    has fewer than `least` positions of a sequence."""
    costs = with_drafts_of_requests(pick_costs(manifest, machine, threads), manifest.drafts)
    costs = replace(costs, least=manifest.verify_width or least)
    most = Budget.chain(manifest.widest_tree - 1)
    trees = measured_trees(manifest) if manifest.exact_trees else {}
    chains = measured_chains(manifest)
    untrained = [draft.name for draft in manifest.drafts if not draft.trained]
    heads = {draft.name: n for draft in manifest.drafts if (n := draft.options.most_tokens) is not None}
    return Adaptive(costs, most, learn, threshold, trees, chains, untrained, heads)
