"""Which graphs make up the passes of decoding, and what their times say of plain decoding and of drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from ..speedup.cost_model import FREE, CostTable, Curve, DraftCosts

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo, Manifest

Pass: TypeAlias = "tuple[str, int | str | None, int]"
"""What, after which layer or of which draft, over how many new positions."""


def passes(
    manifest: Manifest, drafts: Sequence[DraftInfo], widths: Iterable[int], *, embed: bool
) -> dict[Pass, list[str]]:
    """The graphs of every pass of plain decoding and of these drafts, at 1 and at `widths` new positions.

    Drafts that branch off after a layer get tail and trunk; what else a draft runs, once per cycle and for every token, its
    options say (`DraftOptions.passes`); one without such passes runs on the host. `embed`: whether embedding rows, and masks where there is a graph for them, come from
    graphs.
    """
    segments = manifest.segments
    first = [name for name in ("embed", "mask") if embed and name in manifest.graphs]
    cuts = {draft.layer: manifest.decoder.cuts.index(draft.layer) for draft in drafts if draft.layer}
    graphs: dict[Pass, list[str]] = {}
    for width in sorted({1, *widths}):
        graphs["plain", None, width] = [*first, *segments, "head"]
        for layer, cut in cuts.items():
            graphs["tail", layer, width] = [*segments[cut:], "head"]
    for layer, cut in cuts.items():
        graphs["trunk", layer, 1] = [*first, *segments[:cut]]
    for draft in drafts:
        own = draft.options.passes(draft, first)
        if own.propose:
            graphs["propose", draft.name, 1] = list(own.propose)
        if own.once:
            graphs["once", draft.name, 1] = list(own.once)
    return graphs


def runnable(drafts: Iterable[DraftInfo], graphs: Collection[str]) -> list[DraftInfo]:
    """Those whose graphs are among these names, an engine's: plans have none of some."""
    return [draft for draft in drafts if {*draft.graphs.values()}.issubset(graphs)]


def cost_table(drafts: Sequence[DraftInfo], seconds: Mapping[Pass, float]) -> CostTable:
    """The table of these passes. A draft of a kind that is not known here, but has graphs, is left out:
    its default share stands."""

    def curve(what: str, which: int | str | None) -> Curve:
        return Curve({at[2]: value for at, value in seconds.items() if at[:2] == (what, which)})

    costs = {draft.name: FREE for draft in drafts if not draft.layer and not draft.graphs}
    for draft in drafts:
        once, propose = (seconds.get((what, draft.name, 1)) for what in ("once", "propose"))
        if once is None and propose is None:
            continue
        own = DraftCosts(propose=propose or 0.0, once=once or 0.0)
        if draft.layer:
            own = replace(own, tail=curve("tail", draft.layer), trunk=seconds["trunk", draft.layer, 1])
        costs[draft.name] = own
    return CostTable(curve("plain", None), costs)
