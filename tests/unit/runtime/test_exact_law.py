"""Exact laws on toy vocabularies: whatever drafts, the law of the text is the target's, to the last bit or to rounding.

No sampling: every draw, of the draft's and of the target's, is followed into every interval of its uniform
(`outcomes.py`), through the real cycle, over several cycles, with processors, end token and limit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.grammar.forced import ForcedTokens
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.sampling import sampler
from vlmexport.runtime.sampling.sampler import Sampling
from vlmexport.runtime.sampling.verify import verify_sampled
from vlmexport.runtime.speedup.stats import Stats

from tests.support import grammars
from tests.support.outcomes import exact_law
from tests.support.pairs import each_value
from tests.support.toy_drafts import DRAFTS, Case, Toy, law_of_last_two
from tests.support.wrong_laws import MUTANTS, left_over_uniforms

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(0.8),
    "top-k": Sampling(1.3, top_k=2),
    "top-p": Sampling(1.1, top_p=0.7),
    "min-p": Sampling(1.4, min_p=0.35),
    "all": Sampling(1.6, top_k=3, top_p=0.95, min_p=0.1),
}
PENALTIES = {
    "": None,
    "penalty": GenerationInfo(repetition_penalty=1.7),
    "n-grams": GenerationInfo(no_repeat_ngram_size=2, suppress_tokens=[2]),
}


def toy(way: str, penalties: str = "", vocabulary: int = 3, limit: int = 5) -> Toy:
    return Toy(
        vocabulary, law_of_last_two(1, vocabulary), law_of_last_two(2, vocabulary), SAMPLINGS[way], limit,
        eos=(0,), generation=PENALTIES[penalties],
    )  # fmt: skip


def distance(law: dict, other: dict) -> float:
    """Largest difference of two probabilities."""
    return max(abs(float(law.get(key, 0) - other.get(key, 0))) for key in {*law, *other})


@each_value(draft=[*DRAFTS], way=[*SAMPLINGS])
def test_a_draft_does_not_change_the_law(draft: str, way: str) -> None:
    given, case = toy(way), DRAFTS[draft]
    found, wanted = exact_law(lambda: given.run(case)), given.plain_law()
    if case.same_stream:
        assert found == wanted
    else:
        assert distance(found, wanted) < 1e-14, "p and q are rounded to float64"
    assert len(wanted) > 5 or way == "greedy"
    if way != "greedy" and draft != "plain":
        total = Stats.total(given.stats)
        assert 0 < total.accepted < total.evaluated, "both outcomes of a proposal are met"


@pytest.mark.parametrize("penalties", [name for name in PENALTIES if name])
@pytest.mark.parametrize("draft", ["chain", "tree", "on-trunk", "heads, tree", "drawn"])
def test_penalties_do_not_change_the_law(draft: str, penalties: str) -> None:
    given = toy("temperature", penalties, vocabulary=4, limit=3)
    found, wanted = exact_law(lambda: given.run(DRAFTS[draft])), given.plain_law()
    assert distance(found, wanted) < 1e-14
    assert distance(wanted, toy("temperature", vocabulary=4, limit=3).plain_law()) > 1e-3, "they do something"


@pytest.mark.parametrize("draft", ["chain", "tree", "on-trunk", "heads, tree", "drawn", "memory", "grammar"])
def test_a_grammar_leaves_the_law_of_masked_decoding(draft: str) -> None:
    given = replace(
        toy("temperature", vocabulary=4, limit=4), grammar=grammars.of_letters(4, "((a|b)c(ab|b)?|ccb)a?")
    )
    case = Case(lambda decoder, law: ForcedTokens("grammar"), lambda: FixedLength(2))
    found = exact_law(lambda: given.run(case if draft == "grammar" else DRAFTS[draft]))
    wanted = given.plain_law()
    assert distance(found, wanted) < 1e-14 and len(wanted) > 5
    assert distance(wanted, toy("temperature", vocabulary=4, limit=4).plain_law()) > 1e-3, "it does something"


@pytest.mark.parametrize("draft", ["tree", "drawn"])
def test_law_of_five_tokens(draft: str) -> None:
    given = toy("temperature", vocabulary=5, limit=3)
    assert distance(exact_law(lambda: given.run(DRAFTS[draft])), given.plain_law()) < 1e-14


QUARTERS = [np.array([a, b, 4 - a - b]) / 4 for a in range(5) for b in range(5 - a)]
"""Every distribution over three tokens in steps of a quarter: exact in float64, so equality below is that of numbers."""


@pytest.mark.parametrize("p", range(len(QUARTERS)))
def test_acceptance_and_residual_have_exactly_the_law_of_p(p: int) -> None:
    """Chains of two tokens from every q and after every second law: exact numbers, compared without a tolerance."""
    first, tokens = QUARTERS[p], range(3)
    for q, shift in itertools.product(range(len(QUARTERS)), (1, 4, 9)):
        laws = {x: QUARTERS[(p + shift * (x + 1)) % len(QUARTERS)] for x in tokens}
        drafts = [QUARTERS[q], QUARTERS[(q + shift) % len(QUARTERS)]]

        def program(first=first, laws=laws, drafts=drafts) -> tuple[int, ...]:
            request = Sampling(1.0)
            drafted = [sampler.draw(drafts[at], request.uniform(at, 7)) for at in range(2)]
            tree = TokenTree.chain([0, *drafted])
            tree.draft_probs = drafts
            third = QUARTERS[(p + drafted[0] + 2 * drafted[1]) % len(QUARTERS)]
            uniforms = [(request.uniform(at, 1), request.uniform(at, 2)) for at in range(3)]
            verdict = verify_sampled(tree, [first, laws[drafted[0]], third].__getitem__, drafts, uniforms)  # type: ignore[arg-type]
            return (*(tree.tokens[node] for node in verdict.path), verdict.token)

        law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        for emitted, mass in exact_law(program).items():
            law[emitted[:1]] += mass
            if len(emitted) > 1:
                law[emitted[:2]] += mass
        for x in tokens:
            assert law[x,] == Fraction(first[x]), (first, drafts)
            went_on = sum(law[x, y] for y in tokens)
            assert went_on == Fraction(min(first[x], drafts[0][x])), "accepted with min(p, q)"
            for y in tokens:
                assert law[x, y] == went_on * Fraction(laws[x][y])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_enumeration_detects_wrong_laws(mutant: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Toy(
        3,
        law_of_last_two(1, 3),
        law_of_last_two(2, 3),
        Sampling(0.8),
        5 if mutant is left_over_uniforms else 3,
    )
    case = mutant(monkeypatch)
    assert distance(exact_law(lambda: given.run(case)), given.plain_law()) > 1e-3
