"""The controller on the virtual clock: what it gains, what it may lose, and that it decides from tokens and tables."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vlmexport.runtime.bundle.stored_costs import FROM_CACHE, FROM_MEMORY, StoredCosts
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.measure.virtual_clock import Reading
from vlmexport.runtime.policy.acceptance import Acceptance
from vlmexport.runtime.policy.adaptive import MAX_SHARED, UNTRAINED_FLOOR, Adaptive
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.policy.logistic import LogisticLength
from vlmexport.runtime.policy.records import LOSS
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speedup.budget import NOTHING, Budget
from vlmexport.runtime.speedup.cost_model import FREE, CostTable, Curve, DraftCosts
from vlmexport.runtime.speedup.predict import ChainCounts, TreeGain

from tests.support.pairs import each_value
from tests.support.simulated_decoding import Outcome, Simulated, play

LEAST = 1 / (1 + LOSS)
"""Speed of a request that lost all it may."""
MOST = Budget.chain(10)
DRAFT = SimpleNamespace(name="draft")
MEMORY, CACHE = Curve(FROM_MEMORY), Curve(FROM_CACHE)


def exit_draft(plain: Curve, trunk: float, propose: float) -> DraftCosts:
    return DraftCosts(Curve({q: (1 - trunk) * s for q, s in plain.measured.items()}), trunk, propose)


TABLES = {
    "lookup": CostTable(MEMORY, {"draft": FREE}),
    "drafter": CostTable(MEMORY, {"draft": DraftCosts(propose=0.08)}),
    "exit": CostTable(MEMORY, {"draft": exit_draft(MEMORY, 0.27, 0.2)}),
    "small exit": CostTable(CACHE, {"draft": exit_draft(CACHE, 0.22, 0.03)}),
    "small lookup": CostTable(CACHE, {"draft": FREE}),
    "heads with a host": CostTable(CACHE, {"draft": DraftCosts(once=0.06, host=1.4)}, host=0.8),
}
EVERY = pytest.mark.parametrize("name", TABLES)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def recorded() -> dict[str, CostTable]:
    """What `tune` measured in runs of `benchmarks/calibration.py`: a table for every draft."""
    found: dict[str, CostTable] = {}
    for path in sorted(RESULTS.glob("calibration-*.json")):
        costs = json.loads(path.read_text(encoding="utf-8")).get("costs")
        if costs is not None:
            table = StoredCosts.parse(costs, path.name).table
            for name, draft in table.drafts.items():
                found[f"{path.stem}, {name}"] = CostTable(table.plain, {"draft": draft}, table.host)
    return found


TREE_HOST = DraftCosts(once=0.06, host=1.4, tree_host={8: 1.6, 15: 2.1})
REPLAYED = {"heads with trees": CostTable(CACHE, {"draft": TREE_HOST}, host=0.8), **recorded()}
"""Tables like those that are measured, and those."""
EVERY_REPLAYED = pytest.mark.parametrize("name", REPLAYED)


def certain(accepted: Callable[[int], int]) -> Outcome:
    """A draft that proposes all it may; `accepted(at)` of it are right after `at` tokens."""
    return lambda at, budget: (budget.depth, min(budget.depth, accepted(at)))


def drawn(alpha: Callable[[int], float], seed: int, found: float = 1.0) -> Outcome:
    """Each token is right with probability alpha(at); something is found with probability `found`."""
    rng = random.Random(seed)

    def outcome(at: int, budget: Budget) -> tuple[int, int]:
        if rng.random() >= found:
            return 0, 0
        accepted = 0
        while accepted < budget.depth and rng.random() < alpha(at + accepted):
            accepted += 1
        return budget.depth, accepted

    return outcome


def run(policy: Any, table: CostTable, outcomes: list[Outcome], length: int = 96) -> list[Reading]:
    """A reading per request, one after the other."""
    return [play(policy, [Simulated(outcome, length, DRAFT)], table) for outcome in outcomes]


def best_fixed(table: CostTable, outcomes: Callable[[], list[Outcome]], length: int = 96) -> float:
    """Speed of the best fixed length, 0 included."""
    return max(total(run(FixedLength(d), table, outcomes(), length)).speedup for d in range(MOST.depth + 1))


def total(readings: list[Reading]) -> Reading:
    return sum(readings, Reading(0.0, 0.0))


@EVERY
def test_a_perfect_draft_is_used_to_its_full_length(name: str):
    table = TABLES[name]
    outcomes = lambda: [certain(lambda at: 99)] * 10  # noqa: E731
    best = best_fixed(table, outcomes)
    policy = Adaptive(table, MOST)
    found = run(policy, table, outcomes())
    assert total(found).speedup >= 0.95 * best
    assert found[-1].speedup == pytest.approx(best, rel=0.04), "once it is known"


@EVERY
def test_a_draft_that_is_always_wrong_costs_at_most_three_percent(name: str):
    table = TABLES[name]
    for learn in ("session", "request"):
        policy = Adaptive(table, MOST, learn)
        found = run(policy, table, [certain(lambda at: 0)] * 200, 60)
        assert total(found).speedup >= LEAST
        assert min(reading.speedup for reading in found) >= LEAST
        if learn == "session":
            assert total(found).speedup >= 0.985, "only probes are left"


@each_value(name=[*TABLES], alpha=[0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97])
def test_steady_acceptance_gains_what_the_best_fixed_length_gains(name: str, alpha: float):
    table = TABLES[name]
    outcomes = lambda: [drawn(lambda at: alpha, seed) for seed in range(40)]  # noqa: E731
    found = total(run(Adaptive(table, MOST), table, outcomes())).speedup
    # Where the least draft has a high price, two rejected ones empty the purse of a request.
    assert found >= (0.9 if name == "heads with a host" else 0.95) * best_fixed(table, outcomes)


HISTORIES = st.lists(st.tuples(st.floats(0, 1), st.integers(10, 120)), max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(TABLES)),
    HISTORIES,
    st.lists(st.integers(0, 10), min_size=1, max_size=30),
    st.integers(0, 100),
)
def test_no_request_is_slower_by_itself(
    name: str, history: list[tuple[float, int]], runs: list[int], longer: int
):
    table = TABLES[name]
    length = shortest(table) + longer
    policy = Adaptive(table, MOST, "request")
    for seed, (alpha, tokens) in enumerate(history):
        play(policy, [Simulated(drawn(lambda at, a=alpha: a, seed), tokens, DRAFT)], table)
    reading = play(policy, [Simulated(certain(lambda at: runs[at % len(runs)]), length, DRAFT)], table)
    assert reading.speedup >= LEAST


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(TABLES)),
    st.lists(st.tuples(st.lists(st.integers(0, 10), min_size=1, max_size=9), st.integers(0, 90)), max_size=8),
)
def test_no_workload_is_slower_and_no_request_by_more_than_it_may_borrow(
    name: str, workload: list[tuple[list[int], int]]
):
    table = TABLES[name]
    policy, so_far = Adaptive(table, MOST), Reading(0.0, 0.0)
    for runs, longer in workload:
        outcome = certain(lambda at, r=runs: r[at % len(r)])
        reading = play(policy, [Simulated(outcome, shortest(table) + longer, DRAFT)], table)
        assert loss(table, reading) <= MAX_SHARED
        so_far += reading
        assert so_far.speedup >= LEAST


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(TABLES)),
    HISTORIES,
    st.lists(st.integers(0, 10), min_size=1, max_size=30),
    st.integers(UNTRAINED_FLOOR, 100),
    st.sampled_from(["session", "request"]),
)
def test_a_short_answer_is_not_slower_either_where_the_draft_is_untrained(
    name: str, history: list[tuple[float, int]], runs: list[int], length: int, learn: str
):
    table = TABLES[name]
    policy = Adaptive(table, MOST, learn, untrained=["draft"])
    for seed, (alpha, tokens) in enumerate(history):
        play(policy, [Simulated(drawn(lambda at, a=alpha: a, seed), tokens, DRAFT)], table)
    reading = play(policy, [Simulated(certain(lambda at: runs[at % len(runs)]), length, DRAFT)], table)
    assert reading.speedup >= LEAST


@pytest.mark.parametrize(("name", "least"), [("lookup", 0.95), ("small lookup", 0.9)])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.9])
def test_untrained_draft_may_spend_its_gains(name: str, least: float, alpha: float):
    table = TABLES[name]
    outcomes = lambda: [drawn(lambda at: alpha, seed, found=0.7) for seed in range(40)]  # noqa: E731
    found = total(run(Adaptive(table, MOST, untrained=["draft"]), table, outcomes())).speedup
    assert found >= least * best_fixed(table, outcomes)


def loss(table: CostTable, reading: Reading) -> float:
    """What a request lost beyond its own 3 %, in the worst chain and the least one after it."""
    mistake = table.cycle_seconds("draft", MOST.depth) + table.cycle_seconds("draft", 1)
    lost = reading.seconds - (1 + LOSS) * reading.plain_seconds
    return lost / (mistake - 2 * table.token_seconds())


def shortest(table: CostTable) -> int:
    """Tokens of a request that loses at most its share by a whole mistake and the least one, at most 60."""
    mistakes = sum(
        table.cycle_seconds("draft", depth) / table.token_seconds() - 1 for depth in (1, MOST.depth)
    )
    return min(60, math.ceil(mistakes / LOSS))


def test_short_requests_are_slower_by_a_mistake_and_the_least_one_at_most():
    assert [shortest(TABLES[name]) for name in ("lookup", "drafter", "small lookup")] == [13, 43, 56]


@EVERY
def test_draft_recovers_after_a_bad_phase(name: str):
    table = TABLES[name]
    policy = Adaptive(table, MOST)
    for phase, alpha in enumerate((0.9, 0.0, 0.9)):
        outcomes = lambda: [drawn(lambda at: alpha, 100 * phase + seed) for seed in range(30)]  # noqa: B023, E731
        found = run(policy, table, outcomes())
        assert total(found).speedup >= 0.92 * best_fixed(table, outcomes)
        assert max(loss(table, reading) for reading in found) <= MAX_SHARED


@EVERY
def test_within_one_request_it_stops_and_comes_back(name: str):
    table = TABLES[name]
    policy = Adaptive(table, MOST)
    sequence = Simulated(certain(lambda at: 10 if at < 300 or at > 1000 else 0), 1600, DRAFT)
    play(policy, [sequence], table)
    at, drafted = 1, {"good": 0, "turn": 0, "bad": 0, "again": 0}
    cycles = dict.fromkeys(drafted, 0)
    for proposed, accepted in sequence.recorded:
        phase = "good" if at < 300 else "turn" if at <= 400 else "bad" if at <= 1000 else "again"
        drafted[phase] += proposed
        cycles[phase] += 1
        at += accepted + 1
    assert drafted["good"] / cycles["good"] > 4
    assert drafted["bad"] / cycles["bad"] < 1.1
    assert drafted["again"] / cycles["again"] > 2


@pytest.mark.parametrize("name", ["lookup", "small lookup"])
def test_bursts_of_copied_text(name: str):
    table = TABLES[name]
    outcomes = lambda: [  # noqa: E731
        drawn(lambda at: 0.95 if at // 40 % 3 == 0 else 0.1, seed, found=0.5) for seed in range(30)
    ]
    found = run(Adaptive(table, MOST), table, outcomes(), 240)
    assert total(found).speedup >= 0.97 * best_fixed(table, outcomes, 240)
    assert min(reading.speedup for reading in found) >= LEAST


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@EVERY
def test_a_batch_of_sixteen(name: str, alpha: float):
    table = TABLES[name]

    def speed(policy: Any) -> float:
        batches = [
            [Simulated(drawn(lambda at: alpha, 16 * r + i), 60 + 5 * i, DRAFT) for i in range(16)]
            for r in range(4)
        ]
        return total([play(policy, batch, table) for batch in batches]).speedup

    best = max(speed(FixedLength(d)) for d in range(5))
    assert speed(Adaptive(table, MOST)) >= max(LEAST, 0.96 * best)


def test_a_wide_batch_drafts_less_than_a_single_sequence():
    table, lengths = TABLES["drafter"], {}
    for batch in (1, 16):
        policy = Adaptive(table, MOST)
        play(policy, [Simulated(drawn(lambda at: 0.9, i), 400, DRAFT) for i in range(batch)], table)
        sequences = [Simulated(certain(lambda at: 99), 400, DRAFT) for _ in range(batch)]
        lengths[batch] = {budget.depth for budget in policy.allot(sequences)}
    assert len(lengths[16]) == 1 and 0 < max(lengths[16]) < min(lengths[1])


def test_early_loss_is_paid_from_other_gains():
    """Two rejected chains empty the purse of a request where the least chain is dear; the draft is good after them."""
    table = TABLES["heads with a host"]
    unlucky = lambda: certain(lambda at: 0 if at < 3 else 6)  # noqa: E731
    alone, among = Adaptive(table, MOST, "request"), Adaptive(table, MOST)
    run(among, table, [certain(lambda at: 6)])
    best = best_fixed(table, lambda: [unlucky()])
    assert run(alone, table, [unlucky()])[0].speedup < 0.5 * best
    assert run(among, table, [unlucky()])[0].speedup > 0.95 * best


def test_sequences_without_a_draft_and_two_drafts_in_a_batch():
    table = CostTable(MEMORY, {"good": FREE, "bad": FREE})
    policy = Adaptive(table, MOST)
    sequences = [
        Simulated(certain(lambda at: 0), 400, name and SimpleNamespace(name=name))
        for name in ("good", None, "bad")
    ]
    for _ in range(120):
        budgets = policy.allot(sequences)
        assert budgets[1] == NOTHING
        for sequence, budget, right in zip(sequences, budgets, (99, 0, 0), strict=True):
            accepted = min(budget.depth, right)
            verdict = Verdict(list(range(1, accepted + 1)), 0, min(accepted + 1, budget.depth))
            policy.observe(sequence, budget.depth, verdict)
    assert budgets[0] == MOST and budgets[2].depth <= 1


def test_controller_state_stays_in_its_scope():
    table = TABLES["exit"]
    bad, good = certain(lambda at: 0), drawn(lambda at: 0.7, 5)
    for learn, same in (("request", True), ("session", False)):
        fresh, used = Adaptive(table, MOST, learn), Adaptive(table, MOST, learn)
        run(used, table, [bad] * 20)
        records = []
        for policy in (fresh, used):
            sequence = Simulated(drawn(lambda at: 0.7, 5), 96, DRAFT)
            play(policy, [sequence], table)
            records.append(sequence.recorded)
        assert (records[0] == records[1]) is same
    assert good(1, MOST)[0] == MOST.depth


SEEN = ChainCounts([9.0, 5.0, 2.0], [10.0, 9.0, 5.0], 0.6)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(TABLES)),
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 150), st.sampled_from([1, 1, 1, 3])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["session", "request"]),
    st.booleans(),
    st.booleans(),
)
def test_resting_decides_nothing(
    name: str,
    workload: list[tuple[float, float, int, int]],
    learn: str,
    untrained: bool,
    seen: bool,
):
    """A controller that rests allots in every cycle what one allots that looks at each."""
    options: dict[str, Any] = {"trees": {"draft": [TreeGain(Budget(8, 3), 1.5)]}}
    options |= {"seen": {"draft": SEEN}} if seen else {}
    options |= {"untrained": ["draft"]} if untrained else {}
    allotted: list[list[list[Budget]]] = []
    for at_work in (Adaptive, Awake):
        policy = at_work(TABLES[name], MOST, learn, **options)
        allotted.append(found := [])
        for seed, (alpha, hits, length, batch) in enumerate(workload):
            rng = random.Random(seed)
            sequences = [SimulatedDraft() for _ in range(batch)]
            for _ in range(length):
                budgets = policy.allot(sequences)
                found.append(budgets)
                for sequence, budget in zip(sequences, budgets, strict=True):
                    # The same draws whatever is allotted, so that one difference does not hide another.
                    hit, right = rng.random() < hits, [rng.random() < alpha for _ in range(MOST.depth)]
                    accepted = (*right[: budget.depth], False).index(False) if hit else 0
                    verdict = Verdict(list(range(1, accepted + 1)), 0, min(accepted + 1, budget.depth))
                    policy.observe(sequence, budget.nodes if hit else 0, verdict)
    assert allotted[0] == allotted[1]


class SimulatedDraft:
    """A sequence of which the controller is told what became of it."""

    proposer = DRAFT


class Awake(Adaptive):
    """Looks at every cycle."""

    def allot(self, sequences: Any) -> list[Budget]:
        self._rest = None
        return super().allot(sequences)

    def observe(self, sequence: Any, proposed: int, verdict: Verdict) -> None:
        self._rest = None
        super().observe(sequence, proposed, verdict)


@pytest.mark.parametrize(
    "name", sorted({*TABLES} - {"lookup"})
)  # there a probe is paid in every second cycle
def test_where_nothing_pays_it_rests(name: str, monkeypatch: pytest.MonkeyPatch):
    looks, policy = [], Adaptive(TABLES[name], MOST)
    look = policy._budget
    monkeypatch.setattr(policy, "_budget", lambda *args: looks.append(args) or look(*args))
    run(policy, TABLES[name], [certain(lambda at: 0)] * 20, 300)
    assert len(looks) < 0.35 * 20 * 300


def test_no_decision_reads_the_clock(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> float:
        raise AssertionError("the controller asked for the time")

    expected = run(Adaptive(TABLES["exit"], MOST), TABLES["exit"], [drawn(lambda at: 0.8, 1)])
    for name in ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, name, refuse)
    assert run(Adaptive(TABLES["exit"], MOST), TABLES["exit"], [drawn(lambda at: 0.8, 1)]) == expected


def test_acceptance_by_depth():
    learned = Acceptance(memory=1e9)
    for _ in range(300):
        learned.add(2, 3)
    for _ in range(100):
        learned.add(0, 1)
    first, second, third, fourth = learned.rates([0.5] * 4, 1e-9)
    assert (first, second, third) == pytest.approx((0.75, 1.0, 0.0), abs=1e-6)
    assert fourth == pytest.approx((0.5 + third) / 2), (
        "never evaluated: between its prior and the depth above"
    )
    assert Acceptance(10).rates([0.9, 0.8], 2) == pytest.approx([0.9, 0.85])
    fading = Acceptance(memory=5)
    for accepted in [0] * 50 + [1] * 50:
        fading.add(accepted, 1)
    assert fading.rates([0.5], 1e-3)[0] > 0.99


def test_confidence_and_options():
    policy = Adaptive(TABLES["exit"], MOST, confidence_threshold=0.4)
    assert policy.needs_confidence and policy.keep_drafting(0.4) and not policy.keep_drafting(0.39)
    assert not Adaptive(TABLES["exit"], MOST).needs_confidence
    with pytest.raises(OptionError, match="adaptive: 'off'"):
        Adaptive(TABLES["exit"], MOST, "off")


def test_fixed_and_logistic_lengths_allot_chains():
    sequences = [SimpleNamespace(tokens=[0] * n) for n in (1, 64)]
    assert FixedLength(3).allot(sequences) == [Budget.chain(3)] * 2
    assert LogisticLength().allot(sequences) == [Budget.chain(8), Budget.chain(10)]
    assert not LogisticLength().needs_confidence and LogisticLength().keep_drafting(0.0)
    sure = LogisticLength.of(64, 15, threshold=0.4)
    assert sure.needs_confidence and sure.keep_drafting(0.4) and not sure.keep_drafting(0.39)


class Tree8:
    """A draft whose trees of 8 accept half as much again as its chains of 3: a tree saves a miss of the first child."""

    budget = Budget(8, 3)

    def __init__(self, alpha: float, seed: int):
        self._alpha, self._rng = alpha, random.Random(seed)

    def verdict(self, budget: Budget) -> Verdict:
        path: list[int] = []
        while len(path) < budget.depth and self._rng.random() < self._alpha:
            path.append(len(path) + 1)
        chain = len(path)
        if budget.nodes > budget.depth and chain < budget.depth and self._rng.random() < 0.8:
            path.append(chain + 4)  # a sibling; what follows it is judged and wrong
        return Verdict(path, 0, min(len(path) + 1, budget.depth))


def play_tree(plain: Curve, seed: int, trees: dict[str, list[TreeGain]]) -> tuple[float, set[Budget]]:
    """Speed of 300 cycles by the table, and the budgets of the last 200."""
    table = CostTable(plain, {"draft": DraftCosts(once=0.05)})
    policy, draft = Adaptive(table, MOST, trees=trees), Tree8(0.6, seed)
    sequence = Simulated(lambda at, budget: (0, 0), 0, DRAFT)
    seconds, tokens, used = 0.0, 0, []
    for _ in range(300):
        (budget,) = policy.allot([sequence])
        verdict = draft.verdict(budget) if not budget.empty else Verdict([], 0, 0)
        policy.observe(sequence, budget.nodes, verdict)
        seconds += table.cycle_seconds("draft", budget.depth, budget.nodes)
        tokens += len(verdict.path) + 1
        used.append(budget)
    return tokens * table.token_seconds() / seconds, set(used[100:])


def test_trees_are_allotted_where_width_is_cheap_and_learned_chains_do_not_suffer() -> None:
    trees = {"draft": [TreeGain(Tree8.budget, 1.5)]}
    cheap, dear = Curve({1: 1.0, 20: 1.2}), Curve({1: 1.0, 4: 1.2, 9: 3.0})
    with_trees, used = play_tree(cheap, 0, trees)
    without, chains = play_tree(cheap, 0, {})
    assert used == {Tree8.budget} and all(budget.nodes == budget.depth for budget in chains)
    assert with_trees > 1.1 * without
    speed, used = play_tree(dear, 0, trees)
    assert Tree8.budget not in used and speed == pytest.approx(play_tree(dear, 0, {})[0])


def test_a_tree_teaches_what_its_chain_would_have_accepted() -> None:
    """The sibling that a tree accepts is a miss of the chain: rates by depth are those of the chain alone."""
    table = CostTable(Curve({1: 1.0, 20: 1.0}), {"draft": DraftCosts(once=0.01)})
    policy = Adaptive(table, MOST, trees={"draft": [TreeGain(Tree8.budget, 2.0)]})
    sequence, draft = Simulated(lambda at, budget: (0, 0), 0, DRAFT), Tree8(0.6, 1)
    treed = 0
    for _ in range(600):
        (budget,) = policy.allot([sequence])
        treed += budget == Tree8.budget
        policy.observe(sequence, budget.nodes, draft.verdict(budget))
    assert treed > 400
    first, second, *_ = policy._learned["draft"].rates
    assert first == pytest.approx(0.6, abs=0.08) and second == pytest.approx(0.6, abs=0.1)


def test_a_wrong_tree_costs_no_request_more_than_it_may() -> None:
    """Where nothing is ever accepted, 200 requests of 60 tokens stay within 3 % of plain, trees on offer or not."""
    table = CostTable(Curve({1: 1.0, 20: 1.1}), {"draft": DraftCosts(once=0.2)})
    policy = Adaptive(table, MOST, trees={"draft": [TreeGain(Tree8.budget, 3.0)]})
    for _ in range(200):
        reading = play(policy, [Simulated(certain(lambda at: 0), 60, DRAFT)], table)
        assert reading.speedup >= LEAST


@EVERY_REPLAYED
def test_measured_tables_protect_a_session_from_wrong_drafts_and_trees(name: str) -> None:
    """200 requests of 60 tokens, nothing accepted, of chains and of trees, which cost the host more."""
    table = REPLAYED[name]
    trees = {"draft": [TreeGain(Budget(8, 4), 1.2), TreeGain(Budget(15, 4), 1.4)]}
    outcome: Outcome = lambda at, budget: (budget.nodes, 0)  # noqa: E731
    policy = Adaptive(table, MOST, trees=trees, seen={"draft": GOOD})
    assert total(run(policy, table, [outcome] * 200, 60)).speedup >= LEAST


@EVERY_REPLAYED
@pytest.mark.parametrize("alpha", [0.4, 0.8])
def test_measured_tables_gain_what_the_best_fixed_length_gains(name: str, alpha: float) -> None:
    table = REPLAYED[name]
    outcomes = lambda: [drawn(lambda at: alpha, seed) for seed in range(20)]  # noqa: E731
    found = total(run(Adaptive(table, MOST, seen={"draft": GOOD}), table, outcomes())).speedup
    assert found >= 0.9 * best_fixed(table, outcomes)


GOOD = ChainCounts([870, 770, 680, 600], [1000, 870, 770, 680], 1.0)
"""A draft of which `tune` saw 1,000 cycles."""


def test_heads_are_asked_for_as_many_tokens_as_they_have() -> None:
    """A chain that no draft can propose would be weighed against trees that it can."""
    table = TABLES["drafter"]
    asked: dict[str, set[Budget]] = {"heads": set(), "layers": set()}

    for depths, budgets in (({"draft": 3}, asked["heads"]), ({"another": 3}, asked["layers"])):

        def all_right(at: int, budget: Budget, seen: set[Budget] = budgets) -> tuple[int, int]:
            seen.add(budget)
            return budget.depth, budget.depth

        run(Adaptive(table, MOST, depths=depths), table, [all_right])
    assert max(budget.depth for budget in asked["heads"]) == 3
    assert max(budget.depth for budget in asked["layers"]) == MOST.depth


def test_calibrated_acceptance_survives_one_mistake() -> None:
    """Heads that are right but for the first token of every text. A guess gives them up where drafting has a fixed price."""
    table = TABLES["heads with a host"]
    outcome = certain(lambda at: 4 if at > 1 else 0)
    known = Adaptive(table, Budget.chain(4), "request", seen={"draft": GOOD})
    best = best_fixed(table, lambda: [outcome])
    assert total(run(known, table, [outcome] * 10)).speedup > 0.95 * best
    assert total(run(Adaptive(table, Budget.chain(4), "request"), table, [outcome] * 10)).speedup < 0.9 * best


@EVERY
def test_calibrated_acceptance_may_be_overruled(name: str) -> None:
    """Nothing is ever accepted: the advance on the draft is lost once in a session, and never by itself in a request."""
    table = TABLES[name]
    wrong = [certain(lambda at: 0)] * 200
    alone = run(Adaptive(table, MOST, "request", seen={"draft": GOOD}), table, wrong, 60)
    assert min(reading.speedup for reading in alone) >= LEAST
    together = run(Adaptive(table, MOST, seen={"draft": GOOD}), table, wrong, 60)
    assert sum(max(0.0, loss(table, reading)) for reading in together) <= MAX_SHARED
    assert total(together).speedup >= LEAST and together[-1].speedup > 0.985


def test_costly_mistake_leaves_the_shortest_chain() -> None:
    table = TABLES["heads with a host"]
    policy = Adaptive(table, MOST, "request", seen={"draft": GOOD})
    sequence = Simulated(lambda at, budget: (0, 0), 0, DRAFT)
    (first,) = policy.allot([sequence])
    policy.observe(sequence, first.nodes, Verdict([], 0, 1))
    (second,) = policy.allot([sequence])
    assert first.depth > second.depth > 0
