"""Acceptance, trees and sampling: exact laws on toy vocabularies, not samples of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.sampling.sampler import Sampling, counter_uniform, draw, warp
from vlmexport.runtime.sampling.verify import verify_draws, verify_forced, verify_sampled

VOCABULARY = 3


@st.composite
def trees(draw_: st.DrawFn, most: int = 7) -> TokenTree:
    tokens, parents, used = [draw_(st.integers(0, VOCABULARY - 1))], [-1], set()
    for node in range(1, draw_(st.integers(1, most))):
        edge = (draw_(st.integers(0, node - 1)), draw_(st.integers(0, VOCABULARY - 1)))
        assume(edge not in used and edge[0] < len(tokens))
        used.add(edge)
        parents.append(edge[0])
        tokens.append(edge[1])
    return TokenTree(tokens, parents)


@given(trees())
def test_ancestors_and_depths_agree_with_walking_up(tree: TokenTree) -> None:
    for node in range(len(tree)):
        path, up = set(), node
        while up >= 0:
            path.add(up)
            up = tree.parents[up]
        assert set(np.flatnonzero(tree.ancestors[node])) == path
        assert tree.depths[node] == len(path) - 1
    assert tree.is_chain == (tree.parents == list(range(-1, len(tree) - 1)))


@pytest.mark.parametrize(
    ("tokens", "parents"), [([], []), ([1], [0]), ([1, 2], [-1]), ([1, 2], [-1, 1]), ([1, 2, 2], [-1, 0, 0])]
)
def test_tree_refuses_what_is_not_a_tree(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError, match=r"tree|parent|children"):
        TokenTree(tokens, parents)


@given(trees(), st.randoms(use_true_random=False))
def test_greedy_path_stays_within_the_tree(tree: TokenTree, random) -> None:
    best = [random.randrange(VOCABULARY) for _ in range(len(tree))]
    verdict = verify_draws(tree, lambda node, depth: best[node])
    node = 0
    for child in verdict.path:
        assert tree.parents[child] == node
        assert tree.tokens[child] == best[node]
        node = child
    assert verdict.token == best[node]
    assert verdict.token not in {tree.tokens[c] for c in range(len(tree)) if tree.parents[c] == node}
    assert len(verdict.path) <= verdict.evaluated <= tree.proposed
    if tree.is_chain:
        slow = TokenTree(tree.tokens, tree.parents)
        slow.is_chain = False
        assert verify_draws(slow, lambda node, depth: best[node]) == verdict


@settings(max_examples=60)
@given(trees(5), st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 10))
def test_draw_and_match_has_exactly_the_target_law(tree: TokenTree, weights: list[int], salt: int) -> None:
    """Enumerate every outcome of every draw: the emitted stream must have the law of plain sampling."""
    assume(sum(weights) > 0)

    def law(prefix: tuple[int, ...]) -> list[Fraction]:
        shift = (sum(prefix) * 7 + len(prefix) + salt) % VOCABULARY
        rolled = weights[shift:] + weights[:shift]
        return [Fraction(weight, sum(weights)) for weight in rolled]

    horizon = max(tree.depths) + 1
    plain: dict[tuple[int, ...], Fraction] = {(): Fraction(1)}
    for _ in range(horizon):
        plain = {
            (*prefix, token): mass * share
            for prefix, mass in plain.items()
            for token, share in enumerate(law(prefix))
            if share
        }
    speculative: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for draws in itertools.product(range(VOCABULARY), repeat=horizon):
        used = 0

        def choose(node: int, depth: int, draws: tuple[int, ...] = draws) -> int:
            nonlocal used
            used = depth + 1
            return draws[depth]

        verdict = verify_draws(tree, choose)
        emitted = (*(tree.tokens[node] for node in verdict.path), verdict.token)
        assert emitted == draws[:used], "the stream is the draws themselves: equal to plain sampling"
        mass = Fraction(1)
        for depth, token in enumerate(draws):
            mass *= law(draws[:depth])[token]
        speculative[draws] += mass
    assert {key: mass for key, mass in speculative.items() if mass} == plain


def test_sampled_trees_are_refused() -> None:
    p = np.array([0.5, 0.3, 0.2])
    with pytest.raises(ValueError, match="chain"):
        verify_sampled(TokenTree([0, 1, 2], [-1, 0, 0]), [p, p, p].__getitem__, [p] * 2, [(0.5, 0.5)] * 3)


def test_sampled_edges() -> None:
    point, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    chain = TokenTree.chain([0, 0])
    assert verify_sampled(chain, [other, other].__getitem__, [point], [(0.0, 0.5)] * 2).path == [], (
        "p = 0 is never accepted"
    )
    assert verify_sampled(chain, [point, other].__getitem__, [point], [(0.999999, 0.5)] * 2) == ([1], 1, 1)
    assert verify_sampled(chain, [point, other].__getitem__, [np.zeros(2)], [(0.5, 0.5)] * 2).path == [1], (
        "q = 0, p > 0"
    )


def test_forced_acceptance_is_counted() -> None:
    chain = TokenTree.chain([9, 1, 2, 3])
    verdict = verify_forced(chain, lambda node, depth: 7, [0.1, 0.2, 0.95], 0.9)
    assert verdict == ([1, 2], 7, 3)
    assert verify_forced(chain, lambda node, depth: 7, [0.1] * 3, 0.9) == ([1, 2, 3], 7, 3)


logits_lists = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=2, max_size=9)  # exact in float


@given(logits_lists, st.floats(0.05, 4), st.integers(0, 9), st.floats(0.01, 1.0))
def test_warp_is_a_distribution_over_the_right_tokens(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.array(values, np.float32)
    out = warp(logits, temperature, top_k, top_p)
    assert out.sum() == pytest.approx(1)
    assert out[logits.argmax()] > 0
    kept = np.flatnonzero(out > 0)
    if top_k:
        threshold = np.sort(logits)[::-1][min(top_k, len(values)) - 1]
        assert (logits[kept] >= threshold).all()
    full = warp(logits, temperature, top_k)
    if top_p < 1:
        assert full[kept].sum() >= top_p - 1e-9, "the kept tokens reach top_p"
        assert full[kept].sum() - full[kept].min() <= top_p + 1e-9, "and no smaller set does"
        assert full[kept].min() >= np.delete(full, kept).max(initial=0), "the likeliest are kept"


def test_warp_breaks_ties_by_lowest_id() -> None:
    """Lower ids first, in any number of equals, and no token more than the mass needs."""
    assert warp(np.zeros(64, np.float32), 1.0, top_p=0.25).nonzero()[0].tolist() == list(range(16))


@given(logits_lists)
def test_temperature_zero_is_argmax_with_the_lowest_id(values: list[float]) -> None:
    logits = np.array(values, np.float32)
    best = min(i for i, value in enumerate(logits) if value == logits.max())
    assert Sampling().choose(logits, 3) == best
    assert warp(logits, 0).tolist() == [float(i == best) for i in range(len(values))]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulative_sum(weights: list[int], uniform: float) -> None:
    assume(sum(weights) > 0)
    index = draw(np.array(weights, np.float64), uniform)
    assert weights[index] > 0
    below = Fraction(sum(weights[:index]), sum(weights))
    assert below <= Fraction(uniform) + Fraction(1, 10**12)
    assert Fraction(uniform) < below + Fraction(weights[index], sum(weights)) + Fraction(1, 10**12)


def test_uniforms_depend_on_seed_and_index_only() -> None:
    values = np.array([[counter_uniform(seed, index) for index in range(2000)] for seed in range(4)])
    assert ((values >= 0) & (values < 1)).all()
    assert np.abs(values.mean(1) - 0.5).max() < 0.03
    assert np.abs(np.corrcoef(values) - np.eye(4)).max() < 0.08
    assert counter_uniform(3, 5) == Sampling(1.0, seed=3).uniform(5)
    assert len({*values.ravel()}) == values.size


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"temperature": "1"}, {"top_k": -1}, {"top_k": 1.5},
        {"top_p": 0}, {"top_p": None}, {"seed": -1}, {"seed": 0.5}, {"seed": True}, {"seed": 1 << 64},
    ],
)  # fmt: skip
def test_sampling_refuses(options: dict) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Sampling(**options)


def test_numpy_numbers_are_numbers() -> None:
    found = Sampling(np.float32(0.5), np.int64(3), np.float64(0.5), np.uint64(7))
    assert found == Sampling(0.5, 3, 0.5, 7)
    assert found.uniform(2) == counter_uniform(7, 2)
