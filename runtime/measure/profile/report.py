"""What the times of single graphs say: passes, drafts, where a request's time goes, and what drafting would gain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...bundle.stored_acceptance import stored_acceptance
from ...common.errors import InputError
from ...speedup.cost_model import CostTable, expected_tokens
from ...speedup.predict import best_length, longest_drafts
from ..pass_costs import cost_table, passes
from .results import Timing

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo, Manifest
    from .host import Cycles

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance of a drafted token for which a draft's best length is predicted."""


def table_of(manifest: Manifest, timings: Iterable[Timing], *, embed: bool) -> CostTable:
    """Seconds of the passes, from medians of their graphs. Drafts and widths that were not timed are left out.

    Raises InputError where not even a pass of one token was timed.
    """
    medians = {
        (each.graph, each.width): each.median / 1e3 for each in timings if each.profile in ("token", "verify")
    }
    widths = sorted({width for graph, width in medians if graph == "head"})
    drafts = [draft for draft in manifest.drafts if _timed(manifest, draft, widths, medians, embed)]
    made_of = passes(manifest, drafts, widths, embed=embed)
    seconds = {
        each: sum(medians[graph, each[2]] for graph in graphs)
        for each, graphs in made_of.items()
        if all((graph, each[2]) in medians for graph in graphs)
    }
    if ("plain", None, 1) not in seconds:
        raise InputError(
            "no pass of one token was timed: times of head and of every segment at width 1 are needed"
        )
    return cost_table(drafts, seconds)


def _timed(
    manifest: Manifest,
    draft: DraftInfo,
    widths: Sequence[int],
    medians: Mapping[tuple[str, int], float],
    embed: bool,
) -> bool:
    own = [graphs for what, graphs in passes(manifest, [draft], widths, embed=embed).items() if what[2] == 1]
    return all((graph, 1) in medians for graphs in own for graph in graphs)


def build_report(
    manifest: Manifest,
    timings: Sequence[Timing],
    about: Mapping[str, Any],
    *,
    embed: bool,
    tokens: int,
    alpha: float,
    cycles: Callable[[str | None, int], Cycles | None] | None = None,
) -> dict[str, Any]:
    """One JSON object (schema: `schemas/profile-1.json`). `about`: what was timed, how and where. The split of a request is
    of one picture, a chunk of a prompt and `tokens` generated ones, drafted at acceptance `alpha`; `cycles` times whole
    cycles of a draft at a length, without which the host's share is not known."""
    table = table_of(manifest, timings, embed=embed)
    longest = longest_drafts(manifest, table)
    token = table.token_seconds()
    predicted = []
    for draft in sorted(table.drafts):
        for each in ALPHAS:
            length, speedup = best_length(table, draft, each, longest[draft])
            lengths = range(1, longest[draft] + 1)
            predicted.append(
                {
                    "draft": draft, "acceptance": each, "draft_length": length, "speedup": speedup,
                    "tokens_per_second": speedup / token,
                    "by_length": {str(d): table.speedup(draft, [each], d) / token for d in lengths},
                }
            )  # fmt: skip
    return {
        "schema_version": 1,
        **about,
        "graphs": [each.report() for each in timings],
        "passes": {str(width): 1e3 * seconds for width, seconds in table.plain.measured.items()},
        "width_cost": {str(width): seconds / token for width, seconds in table.plain.measured.items()},
        "tokens_per_second": 1 / token,
        "drafts": {
            name: {
                "trunk_ms": 1e3 * costs.trunk, "propose_ms": 1e3 * costs.propose, "once_ms": 1e3 * costs.once,
                "tail_ms": None if costs.tail is None else {str(w): 1e3 * s for w, s in costs.tail.measured.items()},
            }
            for name, costs in sorted(table.drafts.items())
        },
        "predictions": predicted,
        "measured": measured(manifest, table, longest),
        "request": split(manifest, timings, table, tokens=tokens, alpha=alpha, longest=longest, timed=cycles),
    }  # fmt: skip


def measured(manifest: Manifest, table: CostTable, longest: Mapping[str, int]) -> dict[str, Any]:
    """Of every draft whose acceptance the bundle knows (`vlmexport tune`, decoding chains): the prediction for that."""
    predictions: dict[str, Any] = {}
    for entry in stored_acceptance(manifest):
        counts, draft = entry.observed, entry.draft
        if draft in table.drafts and counts.is_chain and sum(counts.evaluated):
            alpha = sum(counts.accepted) / sum(counts.evaluated)
            length, speedup = best_length(table, draft, alpha, longest[draft])
            predictions[draft] = {
                "acceptance": alpha, "draft_length": length, "speedup": speedup,
                "tokens_per_second": speedup / table.token_seconds(), "data": entry.data,
            }  # fmt: skip
    return dict(sorted(predictions.items()))


def split(
    manifest: Manifest,
    timings: Sequence[Timing],
    table: CostTable,
    *,
    tokens: int,
    alpha: float,
    longest: Mapping[str, int],
    timed: Callable[[str | None, int], Cycles | None] | None = None,
) -> dict[str, Any]:
    """Where the time of a request goes, in milliseconds, with the bundle's own draft at the length that is fastest at
    `alpha`. `host` is what cycles take outside their graphs, None where only graphs were timed."""
    roles = {name: graph.role for name, graph in manifest.graphs.items()}
    once: dict[str, float] = defaultdict(float)
    prefill: dict[str, float] = {}
    chunk = 0
    for each in timings:
        if each.profile == "request":
            once[roles[each.graph]] += each.median
        elif each.profile == "prefill":
            prefill[each.graph], chunk = each.median, each.width
    own, length = manifest.policy.draft, 0
    if own is not None and own in table.drafts:
        length = best_length(table, own, alpha, longest[own])[0]
    draft = own if length else None
    cycles = tokens / expected_tokens([alpha], length)
    cycle = table.token_seconds() if draft is None else table.cycle_seconds(draft, length)
    drafting = before = 0.0
    info = None if draft is None else manifest.draft(draft)
    if draft is not None and info is not None:
        costs = table.drafts[draft]
        drafting = costs.once + length * (costs.trunk + costs.propose)
        before = sum(once[role] for role in info.graphs)
    whole = None if timed is None else timed(draft, length)
    milliseconds: dict[str, float | None] = {
        "vision": once["vision"],
        "encoder": once["encoder"] + once["cross_kv"],
        "prefill": sum(prefill.values()),
        "draft": before + 1e3 * cycles * drafting,
        "verify": 1e3 * cycles * (cycle - drafting),
        "host": None if whole is None else 1e3 * cycles * whole.host(cycle),
    }
    return {
        "tokens": tokens, "acceptance": alpha, "draft": draft, "draft_length": length, "prompt_rows": chunk,
        "ms": milliseconds,
    }  # fmt: skip
