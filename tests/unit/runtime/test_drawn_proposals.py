"""Proposals that are drawn from the draft's own distribution: when, with what effect, and on real bundles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.sampling.draft_sampling import DraftSampling
from vlmexport.runtime.sampling.sampler import Sampling
from vlmexport.runtime.session.request import resolve
from vlmexport.runtime.session.request_options import RequestOptions, request_options
from vlmexport.runtime.session.session import Session
from vlmexport.runtime.speedup.stats import Stats

from tests.support.toy_drafts import DRAFTS, Toy, law_of_last_two


def test_proposal_mode_with_higher_acceptance_is_chosen() -> None:
    drawing = DraftSampling(auto=True)
    assert drawing.draws, "unless something speaks against it"
    flat, sharp = np.array([0.4, 0.3, 0.3]), np.array([0.9, 0.1, 0.0])
    drawing.compare(sharp, flat)  # Σ min = 0.5, p(argmax q) = 0.9
    assert not drawing.draws
    drawing.compare(flat, flat)  # 1.0 against 0.4
    assert drawing.draws
    always = DraftSampling(auto=False)
    always.compare(sharp, flat)
    assert always.draws


def acceptance(draft: str, sharpness: float, vocabulary: int = 12) -> float:
    given = Toy(
        vocabulary,
        law_of_last_two(5, vocabulary),
        law_of_last_two(6, vocabulary, sharpness),
        Sampling(1.0),
        60,
    )
    for seed in range(40):
        given.run(DRAFTS[draft], Sampling(1.0, seed=seed))
    alpha = Stats.total(given.stats).alpha
    assert alpha is not None
    return alpha


def test_drawn_self_drafts_are_accepted_more_often() -> None:
    assert acceptance("on-trunk, drawn", 1.0) > acceptance("on-trunk", 1.0) + 0.1


@pytest.mark.parametrize("sharpness", [0.3, 4.0])
def test_choosing_heads_match_the_better_mode(sharpness: float) -> None:
    either = acceptance("heads, either", sharpness)
    assert either >= max(acceptance("heads, drawn", sharpness), acceptance("heads, chain", sharpness)) - 0.02


WAYS = [
    {"draft": "medusa", "draft_length": 3},
    {"draft": "early-exit", "draft_length": 4},
    {"draft": "imitation", "draft_length": 3, "confidence_threshold": 0.2},
]


@pytest.mark.parametrize("family", ["t5", "llama", "vit-gpt2"])
def test_drawn_proposals_near_temperature_0_are_greedy(tiny_bundle: Callable, family: str) -> None:
    """Real engines: all of p lies on one token, whatever was drawn from whatever q; alone and in batches."""
    with Session.load(tiny_bundle(family).path, max_batch=3) as session:
        prompts = [[11, 70, 100, 41, 5], [9, 8, 7], [5, 60, 33, 12], [17, 4]]
        options: dict[str, Any] = {
            "max_new_tokens": 24,
            "temperature": 1e-5,
            "seed": 3,
            "draft_sampling": "drawn",
        }
        if session.bundle.manifest.image is None:
            for ids in prompts:
                greedy = session.generate_tokens(ids, max_new_tokens=24, draft="none").tokens
                for way in WAYS:
                    assert session.generate_tokens(ids, **way, **options).tokens == greedy, way
        image = np.random.default_rng(0).integers(0, 256, (40, 52, 3), np.uint8)
        picture = {} if session.bundle.manifest.image is None else {"image": image}
        text = {} if family == "vit-gpt2" else {"prompt": "the cup on the table"}
        asked = [{**picture, **text, **options, **WAYS[n % 3]} for n in range(5)]
        greedy = session.generate(**picture, **text, max_new_tokens=24, draft="none").tokens
        assert [result.tokens for result in session.generate_batch(asked)] == [greedy] * 5


def test_drawn_texts_repeat_with_their_seed_and_differ_from_matched_ones(tiny_bundle: Callable) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        ids, asked = [11, 70, 100, 41, 5], {"max_new_tokens": 40, "temperature": 1.0, "seed": 4}
        plain = session.generate_tokens(ids, draft="none", **asked).tokens
        for way in WAYS:
            drawn = [session.generate_tokens(ids, **way, **asked, draft_sampling="drawn") for _ in range(2)]
            assert drawn[0].tokens == drawn[1].tokens != plain
            assert drawn[0].lossy is None
            assert session.generate_tokens(ids, **way, **asked).tokens == plain, "with a seed: match"
            assert session.generate_tokens(ids, **way, **asked, draft_sampling="match").tokens == plain


def test_proposal_mode_of_a_request(tiny_bundle: Callable) -> None:
    manifest = tiny_bundle("llama").bundle.manifest

    def way(forced: float | None = None, **options: Any) -> str:
        asked = RequestOptions(forced_acceptance=forced, **options)
        return resolve(asked, manifest, lambda learn, threshold: None).draft_sampling  # type: ignore[arg-type, return-value]

    assert way() == way(draft_sampling="drawn") == "match", "at temperature 0 there is nothing to draw"
    assert way(temperature=1) == "auto"
    assert way(temperature=1, seed=0) == "match"
    assert way(temperature=1, seed=0, draft_sampling="auto") == "auto"
    assert way(temperature=1, lossy="typical") == way(temperature=1, forced=0.5) == "match"
    assert way(temperature=1, draft="none", draft_sampling="drawn") == "match"
    with pytest.raises(OptionError, match="draft_sampling: 'any' is not one of match, drawn, auto"):
        request_options({"draft_sampling": "any"})
    for other in ({"lossy": "typical"}, {"forced_acceptance": 0.5}):
        with pytest.raises(OptionError, match="keeps the distribution"):
            RequestOptions(draft_sampling="drawn", **other)
