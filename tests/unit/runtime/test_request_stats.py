"""Counters of several requests together: one tau for bench, verify and calibration."""

from __future__ import annotations

import pytest
from vlmexport.runtime.speedup.stats import Stats


def request(cycles: list[tuple[int, int]], discarded: int = 0, **fields: object) -> Stats:
    stats = Stats(**fields)  # type: ignore[arg-type]
    for proposed, accepted in cycles:
        stats.count(proposed, accepted, min(accepted + 1, proposed))
    stats.discarded = discarded
    stats.tokens = 1 + sum(accepted + 1 for _, accepted in cycles) - discarded
    stats.check()
    return stats


def test_total_adds_counters_depths_shapes_and_seconds():
    one = request([(3, 3), (3, 0)], draft="a", draft_length=3, time_to_first_token=1.0, total_seconds=3.0)
    two = request([(0, 0), (1, 1)], discarded=1, draft="a", draft_length=3, total_seconds=2.0)
    one.seconds.verify, two.seconds.verify = 0.5, 0.25
    both = Stats.total([one, two])
    both.check()
    assert (both.requests, both.cycles, both.tokens, both.discarded) == (2, 4, 6 + 3, 1)
    assert (both.proposed, both.evaluated, both.accepted) == (7, 5, 4)
    assert (both.evaluated_by_depth, both.accepted_by_depth) == ([3, 1, 1], [2, 1, 1])
    assert both.shapes == {(3, 3): 2, (0, 0): 1, (1, 1): 1}
    assert both.tau == (4 + 4) / 4 and both.alpha == 4 / 5
    assert (both.draft, both.draft_length, both.seconds.verify) == ("a", 3, 0.75)
    assert both.tokens_per_second == pytest.approx((9 - 2) / (5 - 1))


def test_total_of_zero_one_and_mixed_drafts():
    one = request([(2, 1)], draft="a", total_seconds=2.0)
    assert Stats.total([one]).to_dict() == one.to_dict()
    assert Stats.total([]).cycles == 0 and Stats.total([]).tau == 1.0
    Stats.total([]).check()
    assert Stats.total([one, request([(2, 1)], draft="b")]).draft is None


def test_seconds_inside_the_engine_are_added_where_they_are_known():
    none, one, two = Stats(), Stats(engine_seconds=0.0), Stats(engine_seconds=0.5)
    assert Stats.total([none, none]).engine_seconds is None
    assert Stats.total([none, one]).engine_seconds == 0.0, "an engine that does not count them"
    assert Stats.total([two, none, two]).engine_seconds == 1.0


def test_a_tree_counts_its_depth():
    stats = Stats()
    stats.count(7, 2, 3, depth=3)
    assert stats.shapes == {(7, 3): 1}
