"""Plain against speculative decoding of one bundle, token by token, with every draft and with one that is always wrong.

The rule: the same tokens. At another width a float32 kernel may add in another order, so where plain decoding had
two best logits closer than `NEAR_TIE`, a divergence is a near-tie; those are listed, and more than one per 10,000
tokens is a failure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import DraftInfo, Manifest
from ...runtime.drafts.adversarial import always_wrong
from ...runtime.families import get_family
from ...runtime.images.synthetic import synthetic_image
from ...runtime.measure.pass_costs import runnable
from ...runtime.sampling.logits_processors import Processors
from ...runtime.session.active_request import decoder_ids
from ...runtime.session.session import Session
from ...runtime.speedup.stats import Stats
from ..families.common.sample_inputs import ODD_SIZES, SENTENCE
from .generation import NEAR_TIE, first_difference

NODES = 8
"""Drafted tokens of a tree."""

WRONG = "always-wrong"
QUESTIONS = (None, "what is on the table", "how many objects are there", "describe the scene")
TOKENS_PER_NEAR_TIE = 10_000


@dataclass
class NearTie:
    """A divergence where plain decoding itself was undecided."""

    request: int
    token: int
    margin: float
    """Difference of the two best logits of plain decoding at that token."""


@dataclass
class LosslessRow:
    """Plain against speculative decoding with one draft, over all requests."""

    draft: str
    requests: int
    tokens: int
    different: int = 0
    """Requests that differ, near-ties excepted."""
    first_difference: tuple[int, int] | None = None
    """(request, token) of the first divergence that is no near-tie."""
    near_ties: list[NearTie] = field(default_factory=list)
    alpha: float | None = None
    tau: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        first = list(self.first_difference) if self.first_difference else None
        ties = [tie.__dict__ for tie in self.near_ties]
        return {**self.__dict__, "first_difference": first, "near_ties": ties}

    def notes(self) -> list[str]:
        """A sentence for every near-tie."""
        return [
            f"near-tie with draft {self.draft}: request {tie.request} leaves plain decoding at token {tie.token}, "
            f"where its two best logits differ by {tie.margin:.2g}"
            for tie in self.near_ties
        ]


def check_losslessness(
    bundle: Bundle,
    requests: int,
    max_new_tokens: int,
    images: Sequence[Any] = (),
    progress: Callable[[str, int, int], None] | None = None,
    device: str = "cpu",
) -> list[LosslessRow]:
    """A row for every draft of the bundle that the device runs, another for one that proposes trees, and one for a draft that is always
    wrong; none if it has no draft."""
    manifest = bundle.manifest
    if not manifest.drafts:
        return []
    cases = list(sample_requests(manifest, requests, images))
    budget = min(max_new_tokens, manifest.limits.max_length // 2)
    rows = []
    # Rows that are rounded to 8 bits make whole steps of a last bit: passes of such a target all give the same bits.
    near = NEAR_TIE if manifest.target_weights is None else 0.0
    with Session.load(bundle, device) as session:
        arms = _arms(manifest, runnable(manifest.drafts, session.decoder.engine.graphs))
        generate = counted(session, budget, "lossless", len(cases) * (1 + len(arms)), progress)
        plain = [generate(request, speculative=False).tokens for request in cases]
        for arm, name, options in arms:
            with _arm(session, arm, name):
                results = [generate(request, draft=name, **options) for request in cases]
            rows.append(
                _compare(arm, plain, results, lambda at, token: plain_margin(session, cases[at], token), near)
            )
    return rows


def counted(
    session: Session,
    budget: int,
    what: str,
    total: int,
    progress: Callable[[str, int, int], None] | None,
) -> Callable[..., Any]:
    """`generate((image, prompt), **options)` of at most `budget` tokens, which tells `progress` how many of `total` requests
    are done."""
    done = itertools.count(1)

    def generate(request: tuple[Any, Any], **options: Any) -> Any:
        image, prompt = request
        result = session.generate(image=image, prompt=prompt, max_new_tokens=budget, **options)
        if progress:
            progress(what, next(done), total)
        return result

    return generate


def _arms(manifest: Manifest, drafts: Sequence[DraftInfo]) -> list[tuple[str, str, dict[str, Any]]]:
    """What is called how, the draft that it decodes with, and options of `generate`."""
    nodes = min(NODES, manifest.widest_tree - 1)
    arms: list[tuple[str, str, dict[str, Any]]] = [(draft.name, draft.name, {}) for draft in drafts]
    arms += [
        (f"{draft.name} (trees)", draft.name, {"draft_nodes": nodes})
        for draft in drafts
        if draft.options.offers_trees and manifest.exact_trees
    ]
    return [*arms, (f"{WRONG} ({drafts[0].name})", drafts[0].name, {})]


def failures(rows: Sequence[LosslessRow]) -> list[str]:
    """What breaks the rule, as sentences; none means lossless."""
    problems = [
        f"with draft {row.draft}, {row.different} of {row.requests} requests differ from plain decoding"
        for row in rows
        if row.different
    ]
    ties, tokens = sum(len(row.near_ties) for row in rows), sum(row.tokens for row in rows)
    allowed = max(1, tokens // TOKENS_PER_NEAR_TIE)
    if ties > allowed:
        problems.append(
            f"{ties} near-ties in {tokens} tokens; at most {allowed} (1 per {TOKENS_PER_NEAR_TIE:,}) can be chance"
        )
    return problems


def plain_margin(session: Session, request: tuple[Any, Any], token: int) -> float:
    """Difference of the two best logits of plain decoding at output position `token`, after what the model's generation
    configuration does to them; infinite if it ends before."""
    (image, prompt), bundle = request, session.bundle
    result = session.generate(image=image, prompt=prompt, max_new_tokens=token + 1, speculative=False)
    if len(result.tokens) <= token:
        return float("inf")
    manifest, logits = bundle.manifest, session.decoder.heads.last_logits()
    prepared = get_family(manifest.model.family).prepare(bundle, image, prompt)
    before = decoder_ids(manifest, prepared).tolist()
    processors = Processors.from_info(manifest.generation, manifest.text.eos_token_ids, before)
    if processors is not None:
        processors.extend(result.tokens[:token])
        logits = processors.apply(logits)
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


@contextmanager
def _arm(session: Session, arm: str, draft: str) -> Iterator[None]:
    if arm.startswith(WRONG):
        with always_wrong(session, draft):
            yield
    else:
        yield


def _compare(
    arm: str, plain: list[list[int]], results: list[Any], margin: Callable[[int, int], float], near: float
) -> LosslessRow:
    row = LosslessRow(arm, len(plain), sum(len(tokens) for tokens in plain))
    for index, (tokens, result) in enumerate(zip(plain, results, strict=True)):
        at = first_difference(tokens, result.tokens)
        if at is None:
            continue
        gap = margin(index, at)
        if gap < near:
            row.near_ties.append(NearTie(index, at, gap))
        else:
            row.different += 1
            row.first_difference = row.first_difference or (index, at)
    total = Stats.total(result.stats for result in results)
    row.alpha, row.tau = total.alpha, total.tau if total.cycles else None
    return row


def sample_requests(manifest: Manifest, count: int, images: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """(image, prompt) pairs: given images, or drawn pictures; a text model gets parts of a sentence."""
    random = np.random.default_rng(17)
    words = SENTENCE.split()
    for index in range(count):
        if manifest.image is None:
            yield None, " ".join(words[index % len(words) :][: 6 + index % 5] or words)
            continue
        prompt = QUESTIONS[index % len(QUESTIONS)]
        if images:
            yield images[index % len(images)], prompt
            continue
        picture = synthetic_image(*ODD_SIZES[index % len(ODD_SIZES)])
        yield np.roll(picture, tuple(random.integers(0, picture.shape[0], 2)), (0, 1)), prompt
