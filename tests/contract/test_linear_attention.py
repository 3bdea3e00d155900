"""Families with linear attention: what the contract suite asks of every family, on the engines that run them, and the states."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.decoder.states import States
from vlmexport.runtime.decoder.token_tree import TokenTree

from tests.support import lossless
from tests.support.pairs import each_value
from tests.support.remembering import wrong_token
from tests.support.rig import Rig, close
from tests.support.rows import ROWS
from tests.support.tiny_bundles import HOST_ALONE

ENGINES = ("torch", "onnxruntime")
BRANCHING = (
    "medusa",
    "draft_and_verify",
    "eagle",
    "eagle3",
    "vispec",
    "imitation_attends",
    "tree",
    "ragged_trees",
    "commit_of_a_tree_path",
    "batch_on_the_trunk",
)
"""Rows that verify trees, and of a draft that there is not."""

CHAINS = tuple(row for row in ROWS if row not in BRANCHING)
DRAFTS = tuple(
    name
    for name in lossless.DRAFTS
    if name not in ("draft-and-verify", *lossless.SCRIPTED_TREES)
    and not name.endswith(("-tree", "-likeliest"))
)
"""Those that propose chains, or do where they are asked for no more."""


@each_value(groups=[("family", "engine")], family=HOST_ALONE, engine=ENGINES, row=CHAINS)
def test_contract(rigs: Callable, family: str, engine: str, row: str) -> None:
    ROWS[row](lambda name: rigs(name, engine), family)


@each_value(family=HOST_ALONE, engine=ENGINES, draft=DRAFTS)
def test_greedy_equals_generate(rigs: Callable, family: str, engine: str, draft: str) -> None:
    rig = rigs(lossless.bundle_of(family, draft), engine)
    lossless.greedy(rig, draft, seeds=(41,), lengths=(1, 5, 16), limits=(3, 40))


@each_value(family=HOST_ALONE, draft=DRAFTS, together=(3, 16))
def test_batch_equals_generate(rigs: Callable, family: str, draft: str, together: int) -> None:
    lossless.batch(rigs(lossless.bundle_of(family, draft), "onnxruntime"), draft, together, 20)


def chains(rig: Rig, seed: int, generations: int, limit: int = 32) -> tuple[int, int]:
    """(generations, accepted tokens) of so many with chains of 1 to 8 drafts, right with a chance that differs from one to the
    next: 0 is always wrong, 1 always right. All are those of `generate`."""
    chance, accepted = random.Random(seed), 0
    for number in range(generations):
        request = rig.request(seed * 100 + number // 16, chance.choice((1, 2, 5, 17, 40)))
        truth = rig.oracle.greedy(request, limit)
        hit = chance.choice((0.0, 0.5, 0.8, 1.0))
        right = [chance.random() < hit for _ in range(limit)]

        def script(index: int, truth: tuple[int, ...] = truth, right: list[bool] = right) -> int:
            token = truth[index] if index < limit else 7
            return token if index < limit and right[index] else wrong_token(token)

        draft = lossless.Scripted(rig, chance.choice((None, 1)), script)
        run = lossless.generate(rig, request, limit, proposer=draft, length=chance.randint(1, 8))
        assert run.tokens == truth, f"generation {number} of seed {seed}"
        assert hit or run.stats.accepted == 0
        accepted += run.stats.accepted
    return generations, accepted


@pytest.mark.parametrize(
    ("seed", "generations"), [(1, 40), *(pytest.param(s, 250, marks=pytest.mark.slow) for s in range(2, 7))]
)
@pytest.mark.parametrize("family", HOST_ALONE)
def test_no_token_depends_on_what_is_rejected(
    rigs: Callable, family: str, seed: int, generations: int
) -> None:
    _, accepted = chains(rigs(family, "onnxruntime"), seed, generations)
    assert accepted > 5 * generations, "hardly a draft was accepted"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", HOST_ALONE)
def test_states_hold_what_was_accepted_before_the_last_cycle(
    rigs: Callable, family: str, engine: str
) -> None:
    """Whatever passes rejected, states are those of plain decoding up to there."""
    rig = rigs(family, engine)
    request = rig.request(51)
    tokens = rig.oracle.greedy(request, 12)
    rig.start(request)
    chain = TokenTree.chain([*tokens[:3], *(wrong_token(token) for token in tokens[3:7])])
    rig.full(chain)
    rig.accept(chain, [1, 2])
    before = rig.decoder.states.length(0)
    assert before == rig.decoder.arena.lengths[0] - 3
    close(rig.speculate(1, tokens[3:6]), rig.oracle.logits(request, tokens[:6])[4:], "behind a rejection")
    rejected = _states(rig)
    assert rig.decoder.states.length(0) == before + 3
    rig.start(request, tokens[:3])
    for name, state in _states(rig).items():
        if name.startswith("recurrent_state"):
            np.testing.assert_allclose(rejected[name], state, rtol=0, atol=2e-5 * np.abs(state).max())


def _states(rig: Rig) -> dict[str, np.ndarray]:
    """Of the first sequence."""
    decoder = rig.decoder
    inputs, _ = decoder.states.bindings(range(decoder.manifest.decoder.num_layers), 0, 1)
    return {name: decoder.engine.read(view).copy() for name, view in inputs.items()}


@pytest.mark.parametrize("family", HOST_ALONE)
def test_a_pass_that_nobody_finished_costs_nothing(rigs: Callable, family: str) -> None:
    """An exception may end a cycle behind any pass: the next one goes on from what is valid."""
    rig = rigs(family, "onnxruntime")
    request = rig.request(52)
    tokens = rig.oracle.greedy(request, 9)
    rig.start(request)
    chain = TokenTree.chain(list(tokens[:2]))
    rig.full(chain)
    rig.accept(chain, [1])
    rig.decoder.begin_cycle(2)
    rig.decoder.trunk(1, [tokens[2]])
    close(rig.chain(tokens[2:5]), rig.oracle.logits(request, tokens[:5])[3:], "behind a trunk")
    close(rig.chain(tokens[2:6]), rig.oracle.logits(request, tokens[:6])[3:], "behind a whole pass")


@pytest.mark.parametrize("family", HOST_ALONE)
def test_other_engines_are_refused_by_name(rigs: Callable, family: str) -> None:
    with pytest.raises(
        OptionError, match=r"engine .*: .* linear attention, which runs on device 'cpu' alone"
    ):
        rigs(family, "device")


def _folded_too_far(forward_pass: object, lengths: list[int], ahead: int) -> None:
    """A planted error: a state holds the rows of the pass as well."""
    for pending, folded, held in forward_pass.counts:  # type: ignore[attr-defined]
        width = forward_pass.width  # type: ignore[attr-defined]
        for row in range(forward_pass.batch):  # type: ignore[attr-defined]
            pending[row] = lengths[row] - held[row] + ahead
            folded[row] = max(0, pending[row]) + width
            held[row] = lengths[row] + ahead + width
            pending[row] = max(0, pending[row])


def _nothing_replayed(forward_pass: object, lengths: list[int], ahead: int) -> None:
    """A planted error: rows that were accepted are forgotten."""
    for pending, folded, held in forward_pass.counts:  # type: ignore[attr-defined]
        for row in range(forward_pass.batch):  # type: ignore[attr-defined]
            pending[row] = folded[row] = 0
            held[row] = lengths[row]


def _one_row_less(forward_pass: object, lengths: list[int], ahead: int) -> None:
    """A planted error: the first of the rows that are replayed is not."""
    for pending, folded, held in forward_pass.counts:  # type: ignore[attr-defined]
        for row in range(forward_pass.batch):  # type: ignore[attr-defined]
            folded[row] = max(0, lengths[row] - held[row] - 1)
            pending[row] = max(0, lengths[row] - held[row] + ahead - 1)
            held[row] = lengths[row]


@pytest.mark.parametrize("mutant", [_folded_too_far, _nothing_replayed, _one_row_less])
@pytest.mark.parametrize("family", HOST_ALONE)
def test_planted_errors_change_the_text(
    rigs: Callable, family: str, mutant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(family, "onnxruntime")
    monkeypatch.setattr(States, "write_cycle", staticmethod(mutant))
    rig.fresh()
    with pytest.raises(AssertionError, match="generation"):
        chains(rig, 1, 40)
