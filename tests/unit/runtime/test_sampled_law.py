"""20,000 tokens drawn through the real cycle, per way of drafting, against the law of the target: a G-test.

What `test_exact_law.py` follows without drawing is drawn here, with the real uniforms and the real inverse CDF. The
target's law is a function of the last two tokens, so every token is a draw from a known law of its context.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from vlmexport.runtime.sampling.sampler import Sampling
from vlmexport.runtime.speedup.stats import Stats

from tests.support.pairs import fast
from tests.support.toy import PROMPT
from tests.support.toy_drafts import DRAFTS, Case, Toy, law_of_last_two
from tests.support.wrong_laws import NAMED

DRAWS, REQUESTS, VOCABULARY = 20_000, 100, 4
SIGNIFICANCE = 0.01
ARMS = ["heads, chain", "heads, tree", "heads, either", "on-trunk", "on-trunk, drawn"]


def toy() -> Toy:
    return Toy(
        VOCABULARY,
        law_of_last_two(11, VOCABULARY),
        law_of_last_two(12, VOCABULARY),
        Sampling(0.9, top_p=0.95),
        DRAWS // REQUESTS,
    )


def texts(given: Toy, case: Case, requests: int = REQUESTS) -> list[tuple[int, ...]]:
    return [given.run(case, replace(given.sampling, seed=1000 + seed)) for seed in range(requests)]


def p_value(given: Toy, found: list[tuple[int, ...]]) -> float:
    """Chance of a G as large as that of the texts if every token had the target's law; 0 for an impossible token."""
    seen: dict[tuple[int, ...], Counter[int]] = {}
    for text in found:
        for at, token in enumerate(text):
            seen.setdefault((*PROMPT, *text[:at])[-2:], Counter())[token] += 1
    total, freedom = 0.0, 0
    for context, counts in seen.items():
        number = sum(counts.values())
        law = [float(share) for share in given.next_law(context)]
        if any(not law[token] for token in counts):
            return 0.0
        if min(share for share in law if share) * number < 5:
            continue  # too few for the test: contexts with the prompt's tokens, which come once in a text
        total += 2 * sum(count * math.log(count / (number * law[token])) for token, count in counts.items())
        freedom += sum(share > 0 for share in law) - 1
    assert freedom >= 30
    return chi_square_tail(total, freedom)


def chi_square_tail(value: float, freedom: int) -> float:
    """P(chi-square > value), by Wilson and Hilferty's cube root, which is good to 1e-3 from 30 degrees on."""
    scale = 2 / (9 * freedom)
    return math.erfc(((value / freedom) ** (1 / 3) - (1 - scale)) / math.sqrt(2 * scale)) / 2


def test_g_test_tail_matches_tables() -> None:
    for freedom, value in ((30, 50.892), (40, 63.691), (100, 135.807)):
        assert chi_square_tail(value, freedom) == pytest.approx(0.01, rel=0.02)


@fast(("draft",), [(name,) for name in ARMS], {("heads, either",), ("on-trunk, drawn",)})
def test_drawn_tokens_have_the_law_of_the_target(draft: str) -> None:
    given = toy()
    found = texts(given, DRAFTS[draft])
    assert sum(map(len, found)) == DRAWS
    total = Stats.total(given.stats)
    assert 0 < total.accepted < total.evaluated
    assert p_value(given, found) > SIGNIFICANCE / len(ARMS)
    if DRAFTS[draft].same_stream:
        assert found[:10] == texts(given, DRAFTS["plain"], 10)


@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: mutant.__name__)
def test_sampled_law_detects_wrong_laws(mutant: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    given = toy()
    assert p_value(given, texts(given, mutant(monkeypatch), 30)) < 1e-6
