"""Draft & Verify's threshold (arXiv 2309.08168, section 3.4): the rule in exact numbers, and who obeys it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.policy.confidence import AdaptiveThreshold, Threshold, updated
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.session.request import resolve
from vlmexport.runtime.session.request_options import RequestOptions
from vlmexport.runtime.session.session import Session
from vlmexport.runtime.speedup.budget import Budget


@pytest.mark.parametrize(
    ("before", "accepted", "drafted", "after"),
    [
        ((0.0, 0.8), 3, 3, (0.5, 0.801)),  # all right, but few cycles yet: the average is below 0.9
        ((0.5, 0.801), 0, 2, (0.25, 0.802)),
        (
            (0.9, 0.8),
            4,
            4,
            (0.95, 0.799),
        ),  # enough were right, and the threshold stopped it: further next time
        ((0.9, 0.8), 8, 8, (0.95, 0.8)),  # as long as may be: it was not the threshold
        ((1.0, 0.8), 4, 5, (0.9, 0.799)),  # 0.9 is enough
        ((1.0, 0.8), 7, 8, (0.9375, 0.8)),
        ((0.8, 0.3), 1, 1, (0.9, 0.299)),
    ],
)
def test_threshold_update_rule(
    before: tuple[float, float], accepted: int, drafted: int, after: tuple[float, float]
) -> None:
    found = updated(Threshold(*before), accepted, drafted, 8)
    assert found == pytest.approx(after, abs=1e-12)


def test_policy_applies_the_rule_each_cycle() -> None:
    """The first cycles of the published code: threshold 0.8, average 0, at most 8 tokens."""
    policy = AdaptiveThreshold()
    assert policy.allot([None, None]) == [Budget.chain(8)] * 2  # type: ignore[list-item]
    assert policy.needs_confidence and policy.keep_drafting(0.8) and not policy.keep_drafting(0.79999)
    gammas = []
    for accepted, drafted in ((2, 2), (2, 2), (2, 2), (2, 2), (0, 0), (8, 8), (0, 4)):
        policy.observe(None, drafted, Verdict(list(range(1, accepted + 1)), 7, drafted))  # type: ignore[arg-type]
        gammas.append(round(policy.state.gamma, 9))
    # Averages 0.5, 0.75, 0.875, 0.9375, (nothing drafted), 0.96875, 0.484375
    assert gammas == [0.801, 0.802, 0.803, 0.802, 0.802, 0.802, 0.803]
    assert policy.state.acceptance == 0.484375
    with pytest.raises(OptionError, match=r"confidence_threshold: 1\.5"):
        AdaptiveThreshold(8, 1.5)


def test_threshold_options_of_a_request(tiny_bundle: Callable) -> None:
    manifest = tiny_bundle("llama").bundle.manifest

    def policy(**options: object) -> object:
        return resolve(RequestOptions(draft="early-exit", **options), manifest, lambda *_: None).policy  # type: ignore[arg-type,return-value]

    greedy, sampled = policy(adaptive="confidence"), policy(adaptive="confidence", temperature=1.0)
    assert isinstance(greedy, AdaptiveThreshold) and (greedy.longest, greedy.state.gamma) == (8, 0.8)
    assert isinstance(sampled, AdaptiveThreshold) and sampled.state.gamma == 0.5
    own = policy(adaptive="confidence", draft_length=3, confidence_threshold=0.25)
    assert isinstance(own, AdaptiveThreshold) and (own.longest, own.state.gamma) == (3, 0.25)
    assert isinstance(policy(draft_length=3), FixedLength)
    assert policy(adaptive="confidence") is not greedy, "every request begins with its own threshold"


@pytest.mark.parametrize(
    "draft", ["early-exit", "imitation", "draft-and-verify", "medusa", "eagle", "prompt-lookup"]
)
def test_every_draft_supports_the_threshold_with_the_same_text(tiny_bundle: Callable, draft: str) -> None:
    """Chains end where the draft is unsure, if it knows; from 0 on nothing is unsure."""
    with Session.load(tiny_bundle("llama").path, max_batch=2) as session:
        ids = [11, 70, 100, 41, 5]
        plain = session.generate_tokens(ids, max_new_tokens=24, draft="none")
        drafted = []
        for threshold in (1.0, 0.0):
            found = session.generate_tokens(
                ids,
                max_new_tokens=24,
                draft=draft,
                adaptive="confidence",
                confidence_threshold=threshold,
                draft_length=3,
            )
            assert found.tokens == plain.tokens
            assert max(nodes for nodes, _ in found.stats.shapes) <= 3
            drafted.append(found.stats.proposed / found.stats.cycles)
        assert draft == "prompt-lookup" or drafted[0] < 1.5 < 2 < drafted[1], drafted
        drawn = session.generate_tokens(
            ids, max_new_tokens=24, draft=draft, adaptive="confidence", temperature=1.0, seed=3
        )
        alone = session.generate_tokens(ids, max_new_tokens=24, draft="none", temperature=1.0, seed=3)
        assert drawn.tokens == alone.tokens


def test_medusa_heads_stop_after_an_unsure_head(tiny_bundle: Callable) -> None:
    """As drafts on the trunk do: the unsure token is kept, none behind it is proposed."""
    asked: list[float] = []

    class Unsure(FixedLength):
        def keep_drafting(self, confidence: float) -> bool:
            asked.append(confidence)
            return False

    with Session.load(tiny_bundle("llama").path) as session:
        found = session.generate_tokens([5, 6, 7], max_new_tokens=20, draft="medusa", policy=Unsure(3, 0.5))
        assert {nodes for nodes, _ in found.stats.shapes} - {0} == {1}
        assert len(asked) == found.stats.proposed and all(0 < each <= 1 for each in asked)
