"""Which draft pays on this device: pass times, acceptance of every draft of a bundle on a user's own requests, the choice.

First every draft decodes the requests at a fixed budget (`Calibration.survey`): the longest chain, which tells of all
shorter ones, and, where it proposes trees, trees of several sizes. So does every combination of two drafts, with its chain.
The output is the target's own whatever the budget, so only counters and times differ. All drafts decode a request before
the next request comes, in another order each time: a machine that is slow for some seconds is so for all. Passes are timed
alone and brought to what they are within decoding (`in_context_costs.py`).

What the table then predicts within a tenth of the best is decoded itself, beside plain decoding (`Calibration.look`). The
fastest on every second request is chosen; what is predicted of it is its speed-up on the other requests, which had no
part in its being chosen: the best of many is partly lucky, and would disappoint.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..bundle.combined_drafts import combinations
from ..bundle.stored_acceptance import StoredAcceptance, stored_acceptance
from ..bundle.stored_costs import StoredChoice, with_combinations
from ..common.errors import OptionError
from ..graphs.registry import draft_kinds
from ..hardware import machine
from ..measure.benchmark import Progress, measured_costs, time_passes
from ..measure.pass_costs import runnable
from ..measure.tree_search import observed_trees
from ..speedup.budget import Budget
from ..speedup.cost_model import CostTable
from ..speedup.predict import MIN_SPEEDUP, AcceptanceCounts, Prediction, choose, choose_by_reward, predictions
from ..speedup.stats import Stats
from .ab_runs import Arm, Turn, decode, speedup
from .in_context_costs import within_decoding
from .report import is_uncertain, measured_prediction, prediction_row, reported_predictions

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo, Manifest
    from ..session.session import Session

CHAIN = 10
"""Longest chain that a draft is asked for, unless it has fewer heads."""

TREES = (8, 15, 30)
"""Drafted tokens of the trees that every draft decodes; what they tell of others is in `tree_search.py`."""

NEAR = 0.9
"""Share of the best prediction from which a way of drafting is decoded beside plain decoding."""

SECONDS = 20.0
"""As long as all has taken less, requests are decoded again: those of a small model are too short for one look."""

MINUTES = 10.0
"""After which no further request is decoded, but for the first two: a large model decodes fewer."""

FIRST_PART = 0.3
"""Share of these minutes that the survey may take."""

BY = ("speedup", "reward")
"""How a draft is chosen: by predicted speed-up, or by FastVLM's reward of its layer."""

Requests = Sequence[Mapping[str, Any]]
"""`image` and `prompt` of each."""


def budgets(draft: DraftInfo, widest: int, exact_trees: bool = True) -> list[Budget]:
    """What a draft is observed under, at most `widest` drafted tokens; chains where trees are not exact."""
    options = draft.options
    depth = min(options.most_tokens or CHAIN, widest)
    trees = [
        Budget(nodes, depth)
        for nodes in TREES
        if exact_trees and depth < nodes <= widest and options.offers_trees
    ]
    return [Budget.chain(depth), *trees]


def check_calibration(manifest: Manifest, data: str | None, by: str) -> list[DraftInfo]:
    """The drafts to choose among; for what can be told before a bundle is loaded.

    Raises `OptionError`: no draft to choose, nothing to choose by, another `by`.
    """
    if by not in BY:
        raise OptionError(f"--by {by!r:.80} is not one of {', '.join(BY)}")
    drafts = [draft for draft in manifest.drafts if draft.kind in draft_kinds()]
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
    session: Session, requests: Requests, data: str | None, *, minutes: float = MINUTES, **options: Any
) -> dict[str, Any]:
    """Measure and choose; nothing is written. The report's `costs` and `acceptance` are entries for the manifest
    (`bundle.manifest_changes.store_costs`); schema: `schemas/calibrate-1.json`.

    `minutes`: after which no further request is decoded, see `MINUTES`; all else as for `Calibration`, which raises
    `OptionError`.
    """
    begin = time.perf_counter()
    calibration = Calibration(session, data, **options)
    surveyed = calibration.survey(requests, begin + FIRST_PART * 60 * minutes)
    while data is None and time.perf_counter() - begin < SECONDS:
        calibration.survey(requests)
    # Where there was no time for all of them, those that are new come first.
    requests = [*requests[surveyed:], *requests[:surveyed]]
    while calibration.look(requests, begin + 60 * minutes) and time.perf_counter() - begin < SECONDS:
        pass
    return calibration.report()


class Calibration:
    """One calibration: a `survey` of every draft, then `look`s at the best of them, then the `report`.

    Args:
        data: what the requests are called; None where they only serve to time the host: then the bundle's own entries of
            acceptance are chosen by, and there is nothing to look at.
        repeats: of every decoding; the last one counts. least: predicted speed-up from which a draft is chosen.
        by, reward_weight: see `BY` and `choice.choose_by_reward`; the weight is 1/L by default, as in the paper.

    Raises:
        OptionError: see `check_calibration`.
    """

    def __init__(
        self,
        session: Session,
        data: str | None,
        *,
        max_new_tokens: int = 96,
        repeats: int = 2,
        least: float = MIN_SPEEDUP,
        by: str = "speedup",
        reward_weight: float | None = None,
        progress: Progress = lambda what, done, total: None,
    ):
        manifest = session.bundle.manifest
        self._session, self._data, self._least, self._by = session, data, least, by
        self._max_new_tokens, self._repeats, self._progress = max_new_tokens, repeats, progress
        self._weight = 1 / manifest.decoder.num_layers if reward_weight is None else reward_weight
        self._drafts = runnable(check_calibration(manifest, data, by), session.decoder.engine.graphs)
        self._combined = combinations(self._drafts)
        widest = manifest.widest_tree - 1
        self._plain = Arm()
        self._arms = [
            Arm(draft.name, budget)
            for draft in self._drafts
            for budget in budgets(draft, widest, manifest.exact_trees)
        ]
        self._arms += [Arm(name, Budget.chain(min(CHAIN, widest))) for name in self._combined]
        self._shuffle = random.Random(0)
        self._looked_at: list[Mapping[str, Any]] = []

    def survey(self, requests: Requests, until: float | None = None) -> int:
        """Every draft under each of its budgets decodes every request; how many were decoded.

        `until`: a `time.perf_counter` value after which no further request begins, but for the first two. Before the
        first look; once, where acceptance is counted. Raises `OptionError` where no request gives more than one token.
        """
        every = [self._plain, *self._arms]
        done = 0
        for done, request in enumerate(requests, 1):
            self._progress("decoding with every draft", done - 1, len(requests))
            for arm in self._shuffle.sample(every, len(every)):
                arm.decoded.append(self._decode(request, arm))
            if _over(until, done):
                break
        if not Stats.total(self._plain.decoded).cycles:
            raise OptionError(
                "every request ended after one token: nothing was decoded; raise --max-new-tokens"
            )
        return done

    def look(self, requests: Requests, until: float | None = None) -> int:
        """Each of the `contenders` decodes every request beside plain decoding, in another order each time; how many
        requests were decoded, 0 where nothing contends. `until`: as for `survey`."""
        done = 0
        if not self.contenders:
            return done
        for done, request in enumerate(requests, 1):
            self._progress("decoding with the best", done - 1, len(requests))
            number = self._number(request)
            for arm in self._shuffle.sample(self.contenders, len(self.contenders)):
                plain, other = self._decode(request, self._plain), self._decode(request, arm)
                if plain.cycles:
                    arm.turns.append(Turn(number, plain, other))
            if _over(until, done):
                break
        return done

    @cached_property
    def contenders(self) -> list[Arm]:
        """What the survey predicts nearly to be the best of all, and nearly to be worth it."""
        if self._data is None:
            return []
        entries = self._predictions(self._arms)
        if self._by == "reward":
            chosen = self._by_reward()
            entries = [entry for entry in entries if chosen is not None and entry.draft == chosen.draft]
            enough = 0.0
        else:
            enough = self._least
        least = NEAR * max(enough, entries[0].speedup if entries else 0.0)
        return [Arm(entry.draft, entry.budget) for entry in entries if entry.speedup >= least]

    def report(self) -> dict[str, Any]:
        """What was measured, and the choice by it. Raises `ValueError` before a survey."""
        session, manifest = self._session, self._session.bundle.manifest
        table, cache_len = self._timed
        own = {name: costs for name, costs in table.drafts.items() if name not in self._combined}
        costs = measured_costs(session, replace(table, drafts=own), cache_len)
        entries: list[StoredAcceptance] = []
        if self._data is not None:
            entries = [
                StoredAcceptance.of(arm.observed, arm.requests, self._data, costs.date)
                for arm in self._observing()
            ]
        chosen = self._choice()
        costs.choice = StoredChoice.of(chosen)
        looks = {(arm.draft, arm.budget): arm for arm in self._looked()}
        return {
            "schema_version": 1,
            "model": manifest.model.source,
            "fingerprint": manifest.model.fingerprint,
            "data": self._data,
            "requests": {"survey": len(self._plain.decoded), "look": len(self._looked_at)},
            "plain_tokens_per_second": 1 / self._plain.cycle_seconds[0],
            "predictions": [
                prediction_row(entry, looks.get((entry.draft, entry.budget)))
                for entry in reported_predictions(self._predictions(self._observing()), looks)
            ],
            "least": self._least,
            "by": self._by,
            "uncertain": None if chosen is None or self._data is None else is_uncertain(chosen),
            "costs": costs.to_json(),
            "acceptance": [entry.to_dict() for entry in entries],
            "machine": machine.describe(session.decoder.engine.machine),
        }

    # --- private ---

    def _decode(self, request: Mapping[str, Any], arm: Arm) -> Stats:
        return decode(self._session, request, arm.options, self._max_new_tokens, self._repeats).stats

    def _number(self, request: Mapping[str, Any]) -> int:
        """The number of a request, the same whenever it is looked at."""
        for number, known in enumerate(self._looked_at):
            if known is request:
                return number
        self._looked_at.append(request)
        return len(self._looked_at) - 1

    @cached_property
    def _timed(self) -> tuple[CostTable, int]:
        """(the table within decoding, the cache length that it was measured at), as the survey left it."""
        self._progress("timing graphs", 0, 1)
        total = Stats.total(self._plain.decoded)
        if not total.requests:
            raise ValueError("nothing was surveyed")
        widths = {arm.budget.nodes + 1 for arm in self._arms if arm.budget is not None}
        table, cache_len = time_passes(
            self._session,
            self._drafts,
            widths,
            total.prompt_tokens / total.requests,
            total.tokens / total.requests,
        )
        table = with_combinations(table, self._drafts)
        return within_decoding(table, self._plain, self._arms, self._combined), cache_len

    def _known(self, arms: Sequence[Arm]) -> list[AcceptanceCounts]:
        """What the drafts accept: as these arms show it, or as the bundle has it."""
        if self._data is None:
            return [entry.observed for entry in stored_acceptance(self._session.bundle.manifest)]
        return [arm.observed for arm in arms]

    def _predictions(self, arms: Sequence[Arm]) -> list[Prediction]:
        """Of what these arms show, and of the best trees that they tell of, fastest first."""
        table, known = self._timed[0], self._known(arms)
        entries = predictions(table, known)
        manifest = self._session.bundle.manifest
        if not manifest.exact_trees:
            return sorted(
                (entry for entry in entries if entry.budget.nodes == entry.budget.depth),
                key=lambda entry: -entry.speedup,
            )
        widest = manifest.widest_tree - 1
        for name, trees in observed_trees(self._drafts, known).items():
            mine = [entry.budget for entry in entries if entry.draft == name]
            # What a decoded budget became may be smaller than it: the same tree by another name.
            became = [told.budget for budget in mine if (told := trees.predict(table, budget)) is not None]
            entries += [entry for entry in trees.best(table, widest) if entry.budget not in (*mine, *became)]
        return sorted(entries, key=lambda entry: -entry.speedup)

    def _observing(self) -> list[Arm]:
        """What was surveyed, and what else was looked at."""
        surveyed = {(arm.draft, arm.budget) for arm in self._arms}
        return [*self._arms, *(arm for arm in self._looked() if (arm.draft, arm.budget) not in surveyed)]

    def _by_reward(self) -> Prediction | None:
        layers = {draft.name: draft.layer for draft in self._drafts if draft.layer}
        return choose_by_reward(self._timed[0], self._known(self._arms), layers, self._weight)

    def _looked(self) -> list[Arm]:
        return [arm for arm in self.contenders if arm.turns]

    def _choice(self) -> Prediction | None:
        """Of what was looked at the fastest, as one half of the requests shows it, with what the other half says of it;
        without a look by the table."""
        looked = self._looked()
        if not looked:
            if self._by == "reward":
                return self._by_reward()
            return choose(self._timed[0], self._known(self._arms), self._least)
        prediction = measured_prediction(max(looked, key=lambda arm: speedup(arm.halves[0])))
        return prediction if self._by == "reward" or prediction.speedup >= self._least else None


def _over(until: float | None, done: int) -> bool:
    return until is not None and done >= 2 and time.perf_counter() >= until
