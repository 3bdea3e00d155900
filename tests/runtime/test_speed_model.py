"""The speed model against its closed form, by hand, and by simulation."""

from __future__ import annotations

import random

import pytest
from vlmexport.runtime.measure.speed_model import Costs, cycle_seconds, expected_tokens, speedup_bound


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.95])
@pytest.mark.parametrize("length", [0, 1, 5, 16])
def test_one_alpha_gives_the_closed_form(alpha: float, length: int) -> None:
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


def test_cycle_and_bound_by_hand() -> None:
    costs = Costs(plain={1: 10.0}, tail={4: 9.0}, trunk=2.0, propose=1.0)
    assert cycle_seconds(costs, 3) == 3 * (2 + 1) + 2 + 9
    assert speedup_bound(costs, [1.0], 3) == pytest.approx(4 * 10 / 20)
    assert speedup_bound(costs, [0.5], 3) == pytest.approx(1.875 * 10 / 20)
