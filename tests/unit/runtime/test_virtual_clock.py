"""The virtual clock by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vlmexport.runtime.measure.virtual_clock import Reading, decoding
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.speedup.cost_model import CostTable, Curve, DraftCosts
from vlmexport.runtime.speedup.stats import Stats

from tests.support.simulated_decoding import Simulated, cycles, plain_seconds, play

TABLE = CostTable(Curve({1: 10.0, 2: 11.0, 4: 14.0, 8: 30.0}), {"draft": DraftCosts(propose=1.0)})
DRAFT = SimpleNamespace(name="draft")


def test_recorded_cycles():
    # plain 10; three drafts, two right: 3 + T(4); one draft, wrong: 1 + T(2)
    reading = cycles(TABLE, "draft", [(0, 0), (3, 2), (1, 0)])
    assert reading == Reading(10 + 17 + 12, 5 * 10)
    assert reading.speedup == pytest.approx(50 / 39)
    assert cycles(TABLE, "draft", []).speedup == 1


def test_counters_of_requests_give_the_same_as_their_cycles():
    one, two = Stats(), Stats()
    for proposed, accepted in ((0, 0), (3, 2)):
        one.count(proposed, accepted, min(accepted + 1, proposed))
    two.count(1, 1, 1)
    one.tokens, two.tokens, two.discarded = 1 + 4, 1 + 1, 1
    together = Stats.total([one, two])
    together.check()
    assert decoding(TABLE, "draft", together) == Reading(10 + 17 + 12, (4 + 1) * 10)
    tree = Stats()
    tree.count(7, 2, 2, depth=3)
    tree.tokens = 4
    assert decoding(TABLE, "draft", tree) == Reading(3 + 30, 30)


def test_batch_cost_follows_its_widest_member():
    right = Simulated(lambda at, budget: (budget.depth, budget.depth), 4, DRAFT)
    silent = Simulated(lambda at, budget: (0, 0), 3, DRAFT)
    reading = play(FixedLength(1), [right, silent], TABLE)
    # two together: 1 step of two rows, T(4); then again; the last token of `silent` alone
    step = 1.0 * 11 / 10
    assert reading.seconds == pytest.approx(2 * (step + 14) + 10)
    assert reading.plain_seconds == plain_seconds(TABLE, [4, 3]) == 3 * 11 + 10
    assert right.recorded == [(1, 1), (1, 1)] and silent.recorded == [(0, 0)] * 3
    assert (len(right.tokens), len(silent.tokens)) == (5, 4)


def test_the_last_token_is_not_drafted():
    sequence = Simulated(lambda at, budget: (budget.depth, budget.depth), 3, DRAFT)
    assert play(FixedLength(5), [sequence], TABLE).seconds == 2 * 1 + TABLE.plain(3)
    assert play(FixedLength(5), [Simulated(lambda at, budget: (9, 9), 1, DRAFT)], TABLE).seconds == 10
