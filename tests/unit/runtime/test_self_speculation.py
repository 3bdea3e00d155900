"""What self-speculation proposes, on logits that are known: no model, no engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.sampling.sampler import Sampling
from vlmexport.runtime.speculative.proposer import Proposer
from vlmexport.runtime.speculative.self_drafting import draft_on_trunk
from vlmexport.runtime.speculative.sequence import Sequence as Request
from vlmexport.runtime.speculative.sequence import SequenceLimits
from vlmexport.runtime.speedup.budget import NOTHING, Budget
from vlmexport.runtime.speedup.stats import Stats

from tests.support.toy import ToyRows

LOGITS = np.random.default_rng(0).standard_normal((4, 12)).astype(np.float32)
EMITTED = [5, 9]


class Trunk:
    """A `Decoder` that notes its passes."""

    def __init__(self) -> None:
        self.passed: list[tuple[int, tuple[int, ...]]] = []

    def trunk(self, cut: int, tokens: Sequence[int], trees: object = None) -> None:
        self.passed.append((cut, tuple(tokens)))


class Drafts(Proposer):
    """A proposer on the trunk whose logits are a function of the step."""

    cut = 1

    def step_logits(self, step: int) -> ToyRows:
        return ToyRows(np.stack([LOGITS[step], LOGITS[3 - step]]))

    def choose(self, sequence: Request, rows: ToyRows, row: int, after: list[int]) -> int:
        return sequence.choose(rows, row, after)


def request(sampling: Sampling, eos: tuple[int, ...] = (), threshold: float | None = None) -> Request:
    made = Request([3], SequenceLimits(99, eos), Stats(), sampling, Drafts(), FixedLength(4, threshold))
    made.tokens = list(EMITTED)
    return made


def propose(sampling: Sampling, *, eos: tuple[int, ...] = (), threshold: float | None = None) -> list[int]:
    """The drafted tokens; asserts that each node of the tree passed the trunk once."""
    decoder, trees = Trunk(), [None]
    cut = draft_on_trunk(decoder, [request(sampling, eos, threshold)], [Budget.chain(4)], trees)  # type: ignore[arg-type]
    tree = trees[0]
    assert cut == 1 and tree is not None and tree.is_chain and tree.tokens[0] == EMITTED[-1]
    assert decoder.passed == [(1, (token,)) for token in tree.tokens]
    return tree.tokens[1:]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0, seed=1)])
def test_draft_uses_positional_draws_and_stops_at_eos(sampling: Sampling) -> None:
    """The target draws token number i with uniform i: a draft agrees with it as often as it can by doing the same."""
    expected = [sampling.choose(LOGITS[row], len(EMITTED) + row) for row in range(4)]
    assert len(set(expected)) == 4
    assert propose(sampling) == expected
    assert propose(sampling, eos=(expected[1],)) == expected[:2]


def test_drafting_stops_below_the_confidence_threshold() -> None:
    sampling = Sampling(temperature=2.0, seed=1)
    tokens = propose(sampling)
    shares = np.exp(LOGITS.astype(np.float64))
    shares /= shares.sum(-1, keepdims=True)
    drawn = [float(shares[row, token]) for row, token in enumerate(tokens)]
    assert any(share < shares[row].max() for row, share in enumerate(drawn)), "not only the likeliest tokens"
    for threshold in (min(drawn) * 0.999, *(share * 1.001 for share in drawn)):
        below = [row for row, share in enumerate(drawn) if share < threshold]
        assert propose(sampling, threshold=threshold) == tokens[: below[0] + 1 if below else 4]


def test_sequences_of_a_batch_pass_the_trunk_in_step() -> None:
    """Each drafts what it would draft alone, as many as it may; a tree from elsewhere goes along node by node."""
    sampling = Sampling(temperature=2.0, seed=1)
    alone = propose(sampling)
    first, second, other = request(sampling), request(sampling), request(sampling)
    second.proposer = first.proposer
    tree = TokenTree([9, 1, 2], [-1, 0, 0])
    decoder, trees = Trunk(), [None, None, tree]
    budgets = [Budget.chain(3), Budget.chain(1), NOTHING]
    assert draft_on_trunk(decoder, [first, second, other], budgets, trees) == 1  # type: ignore[arg-type]
    assert trees[0] is not None and trees[0].tokens == [9, *alone[:3]]
    assert trees[1] is not None and len(trees[1]) == 2
    assert trees[2] is tree
    fed = np.array([tokens for _, tokens in decoder.passed])
    assert fed[:, 0].tolist() == trees[0].tokens
    assert fed[:, 1].tolist() == [*trees[1].tokens, *trees[1].tokens[-1:] * 2], "scratch beyond its own nodes"
    assert fed[:, 2].tolist() == [9, 1, 2, 2]
