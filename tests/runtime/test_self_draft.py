"""What self-speculation proposes, on logits that are known: no model, no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.proposers.self_draft import SelfDraft
from vlmexport.runtime.speculate.policy import FixedLength
from vlmexport.runtime.speculate.proposer import Request
from vlmexport.runtime.speculate.sampling import Sampling

LOGITS = np.random.default_rng(0).standard_normal((4, 12)).astype(np.float32)
EMITTED = [5, 9]


class Trunk:
    """A `Decoder` that notes its passes; the draft logits are a function of the exit row."""

    def __init__(self) -> None:
        self.passed: list[tuple[int, int]] = []

    def trunk(self, cut: int, token: int) -> None:
        self.passed.append((cut, token))

    def draft_logits(self, graph: str, row: int) -> np.ndarray:
        assert graph == "imitation.2" and row == len(self.passed) - 1
        return LOGITS[row]


def propose(sampling: Sampling, *, eos: tuple[int, ...] = (), threshold: float | None = None) -> list[int]:
    """The drafted tokens; asserts that each node of the tree passed the trunk once."""
    info: Any = SimpleNamespace(name="imitation@2", layer=2, graph="imitation.2")
    proposer, decoder = SelfDraft(info, [0, 2, 6]), Trunk()
    proposer.begin(Request((), sampling, eos, FixedLength(4, threshold)))
    tree = proposer.propose(decoder, EMITTED, 4)  # type: ignore[arg-type]
    assert tree.is_chain and tree.tokens[0] == EMITTED[-1]
    assert decoder.passed == [(1, token) for token in tree.tokens]
    return tree.tokens[1:]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0, seed=1)])
def test_a_draft_uses_the_draw_of_its_place_and_ends_with_the_end_token(sampling: Sampling) -> None:
    """The target draws token number i with uniform i: a draft agrees with it as often as it can by doing the same."""
    expected = [sampling.choose(LOGITS[row], len(EMITTED) + row) for row in range(4)]
    assert len(set(expected)) == 4
    assert propose(sampling) == expected
    assert propose(sampling, eos=(expected[1],)) == expected[:2]


def test_drafting_stops_after_a_token_that_is_less_likely_than_the_threshold() -> None:
    sampling = Sampling(temperature=2.0, seed=1)
    tokens = propose(sampling)
    shares = np.exp(LOGITS.astype(np.float64))
    shares /= shares.sum(-1, keepdims=True)
    drawn = [float(shares[row, token]) for row, token in enumerate(tokens)]
    assert any(share < shares[row].max() for row, share in enumerate(drawn)), "not only the likeliest tokens"
    for threshold in (min(drawn) * 0.999, *(share * 1.001 for share in drawn)):
        below = [row for row, share in enumerate(drawn) if share < threshold]
        assert propose(sampling, threshold=threshold) == tokens[: below[0] + 1 if below else 4]
