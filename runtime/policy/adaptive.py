"""The controller: drafts as much as pays, less where it does not, nothing where nothing does, and notices when it does
again.

Its decisions are a function of the tokens so far and of a stored cost table; it never reads the clock. Three parts:

- acceptance by depth, from discounted counts: what a session has seen is the prior of what a request shows;
- the budget that maximises expected tokens per second by the table (`costs.CostTable`), for a whole batch at once;
- a purse per request: what a cycle gained or lost against plain decoding, by the table. A cycle is drafted only if
  the purse could pay for all of it being rejected, so nothing makes a request slower than 1 − LOSS of plain, but
  for one that is shorter than its first mistake (FLOOR, UNTRAINED_FLOOR). What other requests of the session gained
  by a trained draft lends a request some mistakes more (BORROWED): then the session as a whole is not slower. A draft
  that `tune` saw has that much in advance, once in a session.

Where nothing pays, probes of the cheapest shape are paid from PROBES of the time of plain decoding, and a probe that
gained is followed by another at once. Until then the cycles of a lone request are only counted (`rest.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

from ..common.errors import OptionError
from ..sampling.verify import Verdict
from ..speedup.budget import NOTHING, Budget
from ..speedup.cost_model import CostTable
from ..speedup.predict import ChainCounts, TreeGain
from .acceptance import Acceptance
from .base import is_confident
from .records import PROBES, RISK, SESSION_MEMORY, DraftRecord, RequestRecord, worst_loss
from .rest import Rest, cycles_of_rest

UNTRAINED_FLOOR = 10
"""The same of a draft that was not trained (prompt lookup, early exit): whether it helps is another question in each
request, so each begins with chains that even a short answer can pay for."""

MAX_SHARED = 3.0
"""Mistakes that a request may make on what the session has gained by a trained draft. Where the least draft is dear, as
with heads and a slow host, two mistakes at its beginning would leave a request without a draft that is as good in all."""

PRIOR = 0.8
"""Acceptance of a draft of which nothing is known: trained drafts reach it, and a wrong guess is paid from the purse."""


class Drafting(Protocol):
    """What the controller sees of a sequence: which proposer drafts for it, if any."""

    @property
    def proposer(self) -> Any: ...


class _Outcome(NamedTuple):
    """One sequence's part in the cycle that was just decoded."""

    request: RequestRecord
    proposed: int
    accepted: int
    allotted: Budget


def _of_chain(verdict: Verdict) -> tuple[int, int]:
    """(accepted, evaluated) of the path of first children, which stands first in a tree: what a chain would have been."""
    accepted = 0
    while accepted < len(verdict.path) and verdict.path[accepted] == accepted + 1:
        accepted += 1
    return accepted, verdict.evaluated if accepted == len(verdict.path) else accepted + 1


class Adaptive:
    """A policy that learns acceptance. One object serves all requests of a session.

    `costs`: this machine's table or the default. `most`: the largest budget; its depth is the longest chain tried.
    `learn`: "session" keeps what was learned for later requests; "request" starts afresh at each one, so that its
    output and its counters are a function of the request alone. `confidence_threshold` ends a chain early, as in
    `FixedLength`. `trees`: by draft, what may be allotted besides chains. `seen`: by draft, where its learning starts.
    `untrained`: drafts that must earn what they stake (UNTRAINED_FLOOR). `depths`: longest chains of drafts that have one
    shorter than `most` (heads). Raises `OptionError` for another `learn`.
    """

    def __init__(
        self,
        costs: CostTable,
        most: Budget,
        learn: str = "session",
        confidence_threshold: float | None = None,
        trees: Mapping[str, Items[TreeGain]] | None = None,
        seen: Mapping[str, ChainCounts] | None = None,
        untrained: Collection[str] = (),
        depths: Mapping[str, int] | None = None,
    ):
        if learn not in ("session", "request"):
            raise OptionError(f"adaptive: {learn!r:.80} is not session or request")
        self._costs, self._most, self._learn = costs, most, learn
        self._trees, self._seen, self._untrained = trees or {}, seen or {}, frozenset(untrained)
        self._depths = depths or {}
        self.confidence_threshold = confidence_threshold
        self.needs_confidence = confidence_threshold is not None
        self._learned: dict[str, DraftRecord] = {}
        self._requests: WeakKeyDictionary[Any, RequestRecord] = WeakKeyDictionary()
        self._cycle: dict[str, list[_Outcome]] = {}
        self._rest: Rest | None = None
        self._seconds: dict[tuple[str, int], list[float]] = {}
        self._of_trees: dict[tuple[str, int], list[tuple[TreeGain, float]]] = {}
        self._chains = [Budget.chain(length) for length in range(most.depth + 1)]

    def keep_drafting(self, confidence: float) -> bool:
        return is_confident(confidence, self.confidence_threshold)

    def allot(self, sequences: Items[Drafting]) -> list[Budget]:
        """Budgets for the next cycle of these sequences; those with the same draft are one batch."""
        if self._rest is not None and self._rest.goes_on(sequences):
            return [NOTHING]
        self._rest = None
        self._settle()
        groups: dict[str, list[RequestRecord]] = {}
        requests: list[RequestRecord | None] = []
        for sequence in sequences:
            if sequence.proposer is None:
                requests.append(None)
                continue
            request = self._request(sequence)
            groups.setdefault(sequence.proposer.name, []).append(request)
            requests.append(request)
        for name, group in groups.items():
            budget, rest = self._budget(name, group)
            for request in group:
                request.allotted = budget
            if rest and len(sequences) == 1:
                saved, last = PROBES * self._cycle_seconds(name, 1)[0], group[0].tokens + rest
                self._rest = Rest(ref(sequences[0]), group[0], saved, last)
        return [NOTHING if request is None else request.allotted for request in requests]

    def observe(self, sequence: Drafting, proposed: int, verdict: Verdict) -> None:
        """The outcome of a cycle for one sequence. What it cost is settled when all of its batch have reported."""
        if self._rest is not None and self._rest.sequence() is sequence:
            self._rest.observe()
            return
        if sequence.proposer is None:
            return
        request = self._request(sequence)
        allotted, request.allotted = request.allotted, NOTHING  # a cycle that is not asked for drafts nothing
        if not allotted.empty:
            accepted, evaluated = _of_chain(verdict)
            request.learned.add(proposed, accepted, evaluated)
            if proposed:
                request.acceptance.add(accepted, evaluated)
        outcome = _Outcome(request, proposed, len(verdict.path), allotted)
        self._cycle.setdefault(sequence.proposer.name, []).append(outcome)

    # --- private ---

    def _request(self, sequence: Drafting) -> RequestRecord:
        record = self._requests.get(sequence)
        if record is None:
            name = sequence.proposer.name
            known = None if self._learn == "request" else self._learned.get(name)
            learned = self._learned[name] = known or self._beginner(name)
            record = self._requests[sequence] = RequestRecord(learned)
        return record

    def _beginner(self, name: str) -> DraftRecord:
        seen, prior = self._seen.get(name), [PRIOR] * self._longest(name)
        acceptance, hit_rate = Acceptance(SESSION_MEMORY, seen), 1.0 if seen is None else seen.hit_rate
        if name in self._untrained:
            return DraftRecord(prior, acceptance, hit_rate, UNTRAINED_FLOOR)
        if self._learn == "request":
            return DraftRecord(prior, acceptance, hit_rate)
        advance = 0.0 if seen is None else MAX_SHARED * worst_loss(self._cycle_seconds(name, 1))
        return DraftRecord(prior, acceptance, hit_rate, shares_session_gain=True, gained=advance)

    def _longest(self, name: str) -> int:
        """Length of the longest chain that this draft can propose."""
        return min(self._most.depth, self._depths.get(name, self._most.depth))

    def _cycle_seconds(self, name: str, batch: int) -> list[float]:
        """Seconds of a cycle by chain length, from 0."""
        seconds = self._seconds.get((name, batch))
        if seconds is None:
            seconds = [
                self._costs.cycle_seconds(name, depth, batch=batch)
                for depth in range(self._longest(name) + 1)
            ]
            self._seconds[name, batch] = seconds
        return seconds

    def _tree_seconds(self, name: str, batch: int) -> list[tuple[TreeGain, float]]:
        """The trees that a draft may be given, with the seconds of a cycle over each."""
        trees = self._of_trees.get((name, batch))
        if trees is None:
            trees = [
                (tree, self._costs.cycle_seconds(name, tree.budget.depth, tree.budget.nodes, batch))
                for tree in self._trees.get(name, ())
            ]
            self._of_trees[name, batch] = trees
        return trees

    def _settle(self) -> None:
        """Enter the last cycle of every batch into the balances of its requests, by the table."""
        for name, outcomes in self._cycle.items():
            if not outcomes:  # an exception of a signal handler came between two steps of `observe`
                continue
            batch = len(outcomes)
            seconds = self._cycle_seconds(name, batch)
            plain = seconds[0]
            widest = max(outcomes, key=lambda outcome: outcome.proposed)
            taken = self._taken(name, widest.allotted, widest.proposed, batch)
            share, unit, gained, asked = taken / batch, plain / batch, 0.0, False
            for outcome in outcomes:
                emitted = outcome.accepted + 1
                outcome.request.balance += emitted * unit - share
                outcome.request.tokens += emitted
                gained += emitted * unit - share
                asked = asked or not outcome.allotted.empty
            learned = outcomes[0].request.learned
            learned.gained += gained
            if widest.proposed:
                learned.again = gained > 0
            if not asked:
                learned.probe_budget += PROBES * plain
        self._cycle.clear()

    def _taken(self, name: str, allotted: Budget, proposed: int, batch: int) -> float:
        """Seconds of a cycle that verified `proposed` tokens a sequence."""
        if proposed > allotted.depth > 0:
            return self._costs.cycle_seconds(name, allotted.depth, proposed, batch)
        return self._cycle_seconds(name, batch)[min(proposed, self._longest(name))]

    def _budget(self, name: str, group: list[RequestRecord]) -> tuple[Budget, int]:
        """What maximises expected tokens per second among what the purses can pay for; and for how many cycles behind the
        next one that is nothing, as far as that is known."""
        batch, learned = len(group), group[0].learned
        seconds = self._cycle_seconds(name, batch)
        plain = seconds[0]
        worst_case_loss = worst_loss(seconds) / batch
        loss_budget = sum(request.loss_budget(plain / batch, worst_case_loss) for request in group)
        if learned.shares_session_gain:
            others = learned.gained - sum(request.balance for request in group)
            loss_budget += min(max(0.0, others), MAX_SHARED * worst_case_loss * batch)
        hit_rate = learned.hit_rate
        some = hit_rate if batch == 1 else 1 - (1 - hit_rate) ** batch
        survival = [request.survival() for request in group]
        reached = survival[0] if batch == 1 else [sum(at) for at in zip_longest(*survival, fillvalue=0.0)]
        expected, longest, speed = float(batch), 0, batch / plain
        for depth, tokens in enumerate(reached, 1):
            expected += hit_rate * tokens
            cost = seconds[depth]
            if cost - plain > (RISK if depth > 1 else 1.0) * loss_budget:
                break
            now = expected / (some * cost + (1 - some) * plain)
            if now > speed:
                longest, speed = depth, now
        best = None
        for (tree, gain), cost in self._tree_seconds(name, batch):
            if cost - plain > RISK * loss_budget:
                continue
            expected = batch + hit_rate * gain * sum(reached[: tree.depth])
            now = expected / (some * cost + (1 - some) * plain)
            if now > speed:
                best, speed = tree, now
        if best is not None:
            return best, 0
        longest = longest or self._probe(learned, seconds, batch, loss_budget)
        if longest or batch > 1:
            return self._chains[longest], 0
        trees = self._tree_seconds(name, 1)
        return NOTHING, cycles_of_rest(group[0], seconds, trees, reached, loss_budget)

    def _probe(self, learned: DraftRecord, seconds: list[float], batch: int, loss_budget: float) -> int:
        """Length of a probe, 0 for none: the cheapest chain that would gain if all of it were accepted."""
        plain = seconds[0]
        unit = plain / batch
        for depth in range(1, len(seconds)):
            loss = seconds[depth] - plain
            if depth * batch * unit <= loss:
                continue
            if loss > loss_budget:
                return 0
            if learned.again:
                return depth
            if learned.probe_budget < loss:
                return 0
            learned.probe_budget -= loss
            return depth
        return 0
