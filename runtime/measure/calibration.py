"""Which draft pays on this device: pass times, acceptance of every draft of a bundle on a user's own requests, the choice.

Every draft decodes the requests at a fixed budget: the longest chain, which tells of all shorter ones, and, where it
proposes trees, trees of several sizes. The output is the target's own whatever the budget, so only counters and times
differ. All drafts decode a request before the next request comes, in another order each time: a machine that is slow for
some seconds is so for all. Passes are timed alone, and taken to be as much slower within decoding as those of plain
decoding, or of a draft that splits the layers, were there; what cycles took beyond them, of the chain and of every tree,
stands beside them as measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from ..proposers import KINDS
from ..speculate.budget import Budget
from ..speculate.choice import LEAST, Observed, Prediction, choose, choose_by_reward, predictions
from ..speculate.costs import FREE, CostTable
from ..speculate.stats import Stats
from ..speculate.stored_acceptance import StoredAcceptance, stored_acceptance
from ..speculate.stored_costs import StoredChoice
from . import machine
from .benchmark import Progress, measured_costs, time_passes

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo, Manifest
    from ..session import Session

CHAIN = 10
"""Longest chain that a draft is asked for, unless it has fewer heads."""

TREES = (8, 15, 30)
"""Drafted tokens of the trees that are tried."""

SECONDS = 20.0
"""As long as decoding has taken less, all requests are decoded again: those of a small model are too short for one look."""

LEAST_SECONDS = 1e-9
"""In place of nothing, or less, that cycles took beyond their passes."""

BY = ("speedup", "reward")
"""How a draft is chosen: by predicted speed-up, or by FastVLM's reward of its layer."""


@dataclass
class _Arm:
    """One draft under one budget; plain decoding without a draft."""

    draft: DraftInfo | None
    budget: Budget | None
    rounds: list[Stats] = field(default_factory=list)
    """Of all requests, once per round."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Session.generate`."""
        if self.draft is None or self.budget is None:
            return {"speculative": False}
        nodes = self.budget.nodes if self.budget.nodes > self.budget.depth else None
        return {"draft": self.draft.name, "draft_length": self.budget.depth, "draft_nodes": nodes}

    @property
    def cycle_seconds(self) -> tuple[float, float]:
        """(seconds of a cycle, those of them inside the engine; the latter 0 on an engine that does not count them)."""
        total = Stats.total(self.rounds)
        return total.decode_seconds / total.cycles, total.engine_seconds / total.cycles

    @property
    def observed(self) -> Observed:
        """What the draft did, by its counters."""
        assert self.draft is not None and self.budget is not None, "plain decoding observes nothing"
        return Observed.of(self.draft.name, self.budget, self.rounds[0])


def budgets(draft: DraftInfo, widest: int) -> list[Budget]:
    """What a draft is observed under, at most `widest` drafted tokens."""
    depth = min(CHAIN if draft.heads is None else draft.heads, widest)
    trees = [Budget(nodes, depth) for nodes in TREES if depth < nodes <= widest and draft.ranks is not None]
    return [Budget.chain(depth), *trees]


def check_calibration(manifest: Manifest, data: str | None, by: str) -> list[DraftInfo]:
    """The drafts to choose among; for what can be told before a bundle is loaded.

    Raises `OptionError`: no draft to choose, nothing to choose by, another `by`.
    """
    if by not in BY:
        raise OptionError(f"--by {by!r:.80} is not one of {', '.join(BY)}")
    drafts = [draft for draft in manifest.drafts if draft.kind in KINDS]
    if not drafts:
        raise OptionError("this bundle has no draft, so there is nothing to choose from")
    if by == "reward" and not any(draft.layer for draft in drafts):
        raise OptionError(
            "--by reward chooses among drafts that branch off after a layer; this bundle has none"
        )
    if data is None and not stored_acceptance(manifest):
        raise OptionError(
            "nothing was observed of this bundle's drafts yet: give --data, requests as they will come"
        )
    return drafts


def calibrate(
    session: Session,
    requests: Sequence[Mapping[str, Any]],
    data: str | None,
    *,
    max_new_tokens: int = 96,
    repeats: int = 2,
    least: float = LEAST,
    by: str = "speedup",
    reward_weight: float | None = None,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure and choose; nothing is written. The report's `costs` and `acceptance` are entries for the manifest
    (`bundle.folder.store_costs`); schema: `schemas/calibrate-1.json`.

    Args:
        requests: `image` and `prompt` of each. data: what they are called; None where they only serve to time the host:
            then the bundle's own entries of acceptance are chosen by.
        repeats: of every request in every arm; the last one counts. least: predicted speed-up from which a draft is chosen.
        by, reward_weight: see `BY` and `choice.choose_by_reward`; the weight is 1/L by default, as in the paper.

    Raises:
        OptionError: see `check_calibration`; no token to measure.
    """
    manifest = session.bundle.manifest
    drafts = check_calibration(manifest, data, by)
    widest = manifest.widest_tree - 1
    arms = [_Arm(draft, budget) for draft in drafts for budget in budgets(draft, widest)]
    plain, *drafting = _decode(
        session, requests, [_Arm(None, None), *arms], max_new_tokens, repeats, progress
    )
    progress("timing graphs", 0, 1)
    first = plain.rounds[0]
    widths = {arm.budget.nodes + 1 for arm in drafting if arm.budget is not None}
    table, rows = time_passes(
        session, drafts, widths, first.prompt_tokens / first.requests, first.tokens / first.requests
    )
    table = _within_decoding(table, plain, drafting)
    costs = measured_costs(session, table, rows)
    if data is None:
        entries, known = [], [entry.observed for entry in stored_acceptance(manifest)]
    else:
        known = [arm.observed for arm in drafting]
        entries = [StoredAcceptance.of(each, len(requests), data, costs.date) for each in known]
    if by == "reward":
        layers = {draft.name: draft.layer for draft in drafts if draft.layer}
        chosen = choose_by_reward(
            table, known, layers, 1 / manifest.decoder.num_layers if reward_weight is None else reward_weight
        )
    else:
        chosen = choose(table, known, least)
    costs.choice = StoredChoice.of(chosen)
    return {
        "schema_version": 1,
        "model": manifest.model.source,
        "fingerprint": manifest.model.fingerprint,
        "data": data,
        "plain_tokens_per_second": 1 / plain.cycle_seconds[0],
        "predictions": [_row(entry) for entry in _best_of_each(predictions(table, known))],
        "least": least,
        "by": by,
        "costs": costs.to_json(),
        "acceptance": [entry.to_dict() for entry in entries],
        "machine": machine.describe(session.decoder.engine.machine),
    }


def merge(documents: Sequence[Mapping[str, Any]], fingerprint: str) -> tuple[list[Any], list[Any]]:
    """(costs, acceptance) of several reports of `calibrate` of the same model, or of manifests.

    Raises `OptionError` for a document of another model.
    """
    costs: list[Any] = []
    acceptance: list[Any] = []
    for document in documents:
        model = document.get("model")
        found = model.get("fingerprint") if isinstance(model, Mapping) else document.get("fingerprint")
        if found != fingerprint:
            raise OptionError(
                f"--merge: {found!r:.80} is the fingerprint of another model than this bundle's"
            )
        entries = document.get("costs")
        costs += entries if isinstance(entries, list) else [entries]
        acceptance += document.get("acceptance") or []
    return costs, acceptance


def _decode(
    session: Session,
    requests: Sequence[Mapping[str, Any]],
    arms: list[_Arm],
    max_new_tokens: int,
    repeats: int,
    progress: Progress,
) -> list[_Arm]:
    """Every arm decodes every request, `repeats` times in a row; the last one counts, for which the processor's caches
    hold what the arm needs, as they do where one draft serves a robot."""
    shuffle, begin = random.Random(0), time.perf_counter()
    while not arms[0].rounds or time.perf_counter() - begin < SECONDS:
        taken: list[list[Stats]] = [[] for _ in arms]
        for done, request in enumerate(requests):
            progress("decoding", done, len(requests))
            for at in shuffle.sample(range(len(arms)), len(arms)):
                results = [
                    session.generate(**request, max_new_tokens=max_new_tokens, **arms[at].options)
                    for _ in range(repeats)
                ]
                taken[at].append(results[-1].stats)
        for arm, found in zip(arms, taken, strict=True):
            arm.rounds.append(Stats.total(found))
        if not arms[0].rounds[0].cycles:
            raise OptionError(
                "every request ended after one token: nothing was decoded; raise --max-new-tokens"
            )
    return arms


def _within_decoding(table: CostTable, plain: _Arm, drafting: Sequence[_Arm]) -> CostTable:
    """The table with what passes take within decoding, and with what cycles take outside the graphs; of a draft, as its
    chain and each of its trees showed it."""
    whole, inside = plain.cycle_seconds
    table = table.scaled(inside / table.token_seconds()) if inside else table
    costs = dict(table.drafts)
    for arm in drafting:
        seen = arm.observed
        if not seen.is_chain:
            continue
        mine, (whole_cycle, inside_cycle) = costs.get(seen.draft, FREE), arm.cycle_seconds
        if inside_cycle and mine.tail is not None:  # no pass is the target's own
            mine = mine.scaled(inside_cycle / seen.cycle_seconds(table, seen.budget.depth))
        costs[seen.draft] = mine
        passes = seen.cycle_seconds(replace(table, drafts=costs), seen.budget.depth)
        costs[seen.draft] = replace(mine, host=max(0.0, whole_cycle - passes))
    for name, trees in _trees(drafting).items():
        alone = replace(table, drafts={name: replace(costs[name], host=0.0)})
        beyond = {
            arm.observed.budget.nodes: arm.cycle_seconds[0]
            - arm.observed.cycle_seconds(alone, arm.observed.budget.depth)
            for arm in trees
        }
        costs[name] = replace(
            costs[name], tree_host={nodes: max(seconds, LEAST_SECONDS) for nodes, seconds in beyond.items()}
        )
    return replace(table, drafts=costs, host=max(0.0, whole - table.token_seconds()))


def _trees(arms: Sequence[_Arm]) -> dict[str, list[_Arm]]:
    """By draft, those that got trees."""
    found: dict[str, list[_Arm]] = {}
    for arm in arms:
        if not arm.observed.is_chain:
            found.setdefault(arm.observed.draft, []).append(arm)
    return found


def _best_of_each(found: Sequence[Prediction]) -> list[Prediction]:
    """Of every draft its fastest chain, and every tree; `found` is fastest first."""
    chains: set[str] = set()
    best = []
    for entry in found:
        if entry.budget.nodes == entry.budget.depth:
            if entry.draft in chains:
                continue
            chains.add(entry.draft)
        best.append(entry)
    return best


def _row(entry: Prediction) -> dict[str, Any]:
    return {
        "draft": entry.draft, "nodes": entry.budget.nodes, "depth": entry.budget.depth, "speedup": entry.speedup,
        "tokens_per_cycle": entry.tokens_per_cycle, "break_even": entry.break_even,
    }  # fmt: skip
