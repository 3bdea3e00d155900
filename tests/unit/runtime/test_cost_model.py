"""The speed model against its closed form, by hand, and by simulation; cost tables in a manifest."""

from __future__ import annotations

import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vlmexport.runtime.bundle.manifest import DraftInfo
from vlmexport.runtime.bundle.stored_costs import (
    CACHED_BYTES,
    FROM_CACHE,
    FROM_INTEGERS,
    FROM_MEMORY,
    StoredCosts,
    default_costs,
    pick_costs,
)
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.speedup.cost_model import FREE, CostTable, Curve, DraftCosts, expected_tokens


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.95])
@pytest.mark.parametrize("length", [0, 1, 5, 16])
def test_constant_acceptance_gives_the_closed_form(alpha: float, length: int) -> None:
    assert expected_tokens([alpha], length) == pytest.approx((1 - alpha ** (length + 1)) / (1 - alpha))


def test_certain_acceptance_and_none() -> None:
    assert expected_tokens([1.0], 7) == 8
    assert expected_tokens([0.0], 7) == 1
    assert expected_tokens([], 0) == 1
    with pytest.raises(ValueError, match="no acceptance"):
        expected_tokens([], 3)


def test_acceptance_per_depth_equals_simulated_cycles() -> None:
    alphas, rng, cycles, emitted = [0.9, 0.6, 0.8], random.Random(0), 100_000, 0
    for _ in range(cycles):
        accepted = 0
        for depth in range(5):
            if rng.random() >= alphas[min(depth, 2)]:
                break
            accepted += 1
        emitted += accepted + 1
    assert expected_tokens(alphas, 5) == pytest.approx(emitted / cycles, rel=0.01)


def test_passes_of_one_width() -> None:
    """With a `verify_width` a plain pass costs as much as one that verifies, and so does the trunk's."""
    draft = DraftCosts(tail=Curve({1: 1.0, 8: 3.0, 16: 5.0}), trunk=2.0, propose=1.0)
    table = CostTable(Curve({1: 10.0, 8: 15.0, 16: 20.0}), {"exit": draft}, least=8)
    assert table.token_seconds() == 15 and table.token_seconds(batch=2) == 20
    assert table.cycle_seconds("exit", 3) == 3 * 1 + 4 * 2 * 1.5 + 3
    assert table.cycle_seconds("lookup", 3) == table.cycle_seconds("lookup", 0) == 15
    assert table.cycle_seconds("lookup", 3, batch=2) == 20
    assert table.scaled(2).token_seconds() == 30


def test_cycle_and_bound_by_hand() -> None:
    draft = DraftCosts(tail=Curve({4: 9.0}), trunk=2.0, propose=1.0)
    table = CostTable(Curve({1: 10.0, 4: 16.0}), {"exit": draft, "own": DraftCosts(propose=1.0)})
    assert table.cycle_seconds("exit", 3) == 3 * (2 + 1) + 2 + 9
    assert table.speedup("exit", [1.0], 3) == pytest.approx(4 * 10 / 20)
    assert table.speedup("exit", [0.5], 3) == pytest.approx(1.875 * 10 / 20)
    assert table.cycle_seconds("own", 2, nodes=3) == 2 * 1 + 16
    assert table.cycle_seconds("lookup", 3) == 16, "a draft on the host takes no pass"
    for name in ("exit", "own", "lookup"):
        assert table.cycle_seconds(name, 0) == 10
    # two sequences: steps cost as much more as the plain pass, verification is one pass over all rows
    assert table.cycle_seconds("own", 1, batch=2) == pytest.approx(1 * 12 / 10 + 16)
    assert table.speedup("own", [1.0], 1, batch=2) == pytest.approx(2 * 12 / 17.2)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.01, 100), min_size=1))
def test_cost_curve_is_monotonic_and_keeps_measurements(seconds: dict[int, float]) -> None:
    curve = Curve(seconds)
    values = [curve(width) for width in range(1, 200)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(values))
    assert all(curve(width) >= value for width, value in seconds.items())
    rising = sorted(seconds.values())
    if [seconds[width] for width in sorted(seconds)] == rising:
        assert all(curve(width) == value for width, value in seconds.items())


def test_curves_by_hand() -> None:
    curve = Curve({2: 1.0, 4: 2.0, 8: 3.0})
    assert [curve(width) for width in (1, 2, 3, 6, 8)] == [1, 1, 1.5, 2.5, 3]
    assert curve(14) == pytest.approx(3 + 6 * (2 / 6)), "the mean slope, which is above the last"
    assert Curve({4: 2.0})(8) == 4 and Curve({4: 2.0})(2) == 2
    assert Curve({1: 2.0, 2: 1.0})(2) == 2, "noise does not make a wider pass cheaper"
    for wrong in ({}, {0: 1.0}, {1: 0.0}):
        with pytest.raises(ValueError, match="no time"):
            Curve(wrong)


# --- stored tables ---


def manifest(costs: list[Any] | None = None, size: int = CACHED_BYTES + 1) -> Any:
    """What picking a table reads of a manifest: SmolLM2's shape with an early exit after 10 of 30 layers."""
    draft = lambda name, layer, graphs: DraftInfo(  # noqa: E731
        name=name, kind=name.partition("@")[0], layer=layer, graphs=graphs
    )
    return SimpleNamespace(
        costs=costs or [],
        weights=SimpleNamespace(total=size),
        target_weights=None,
        decoder=SimpleNamespace(hidden_size=576, num_layers=30),
        text=SimpleNamespace(vocab_size=49152),
        drafts=[
            draft("early-exit@10", 10, {}),
            draft("imitation@10", 10, {"imitation": "imitation.10"}),
            draft("prompt-lookup", None, {}),
            draft("drafter", None, {"drafter": "drafter"}),
        ],
    )


def test_a_table_survives_json_and_is_picked_by_machine_and_threads() -> None:
    exit_ = DraftCosts(Curve({1: 0.7, 4: 0.8}), 0.3, 0.1)
    old = CostTable(Curve({1: 1.0, 4: 1.5}), {"early-exit@10": exit_})
    new = CostTable(Curve({1: 2.0, 4: 2.5}), {"early-exit@10": exit_, "prompt-lookup": FREE})
    entries = [
        StoredCosts.of(old, "board", 4, "2026-01-01", 128).to_json(),
        StoredCosts.of(new, "board", 4, "2026-02-01", 128).to_json(),
        StoredCosts.of(old, "board", 2, "2026-03-01", 128).to_json(),
    ]
    found = pick_costs(manifest(json.loads(json.dumps(entries))), "board", 4)
    assert found.plain.measured == {1: 2.0, 4: 2.5}
    for depth in (0, 1, 3, 7):
        assert found.cycle_seconds("early-exit@10", depth) == new.cycle_seconds("early-exit@10", depth)
    # a draft that came later: its default share of the measured T(1)
    assert found.drafts["imitation@10"].trunk == pytest.approx(
        2.0 * default_costs(manifest()).drafts["imitation@10"].trunk
    )
    assert pick_costs(manifest(entries), "board", 2).plain(1) == 1.0
    for machine, threads in (("board", 1), ("other", 4)):
        assert pick_costs(manifest(entries), machine, threads).plain.measured == FROM_MEMORY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plain": {"1": -1.0}}, r"costs\[0\]\.plain\.1"),
        ({"plain": {}}, r"costs\[0\]\.plain"),
        ({"plain": {"x": 1.0}}, r"costs\[0\]\.plain"),
        ({"machine": None}, r"costs\[0\]\.machine"),
        ({"drafts": {"a": {"tail": {"0": 1.0}}}}, r"costs\[0\]\.drafts\.a\.tail"),
        ({"drafts": {"a": {"trunk": float("nan")}}}, r"costs\[0\]\.drafts\.a\.trunk"),
    ],
)
def test_a_damaged_entry_is_named(change: dict[str, Any], message: str) -> None:
    entry = {"machine": "m", "threads": 1, "date": "2026-01-01", "plain": {"1": 1.0}} | change
    with pytest.raises(BundleError, match=message):
        pick_costs(manifest([entry]), "m", 1)


def test_default_shares() -> None:
    large, small = default_costs(manifest()), default_costs(manifest(size=CACHED_BYTES))
    assert large.plain.measured == FROM_MEMORY and small.plain.measured == FROM_CACHE
    integers = manifest()
    integers.target_weights = object()
    assert default_costs(integers).plain.measured == FROM_INTEGERS
    exit_, imitation = large.drafts["early-exit@10"], large.drafts["imitation@10"]
    assert exit_.tail is not None
    assert exit_.trunk + exit_.tail(1) == pytest.approx(1.0), "trunk and tail are the whole pass"
    assert 0.2 < exit_.trunk < 1 / 3 and 0.15 < exit_.propose < 0.25, "SmolLM2: its head is a fifth of a pass"
    assert exit_.propose < imitation.propose < exit_.propose + 0.01
    assert large.drafts["prompt-lookup"] == FREE
    assert large.cycle_seconds("drafter", 2) == pytest.approx(0.2 + 1.03)
