"""Drafted against plain decoding in every way of drafting, with no allowance for near-ties: what a bundle's certificate says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from math import isfinite
from typing import Any

from ...runtime.bundle.certificate import Certificate, Difference
from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import DraftInfo, Manifest
from ...runtime.drafts.adversarial import always_wrong
from ...runtime.measure.pass_costs import runnable
from ...runtime.session.session import Session
from .generation import NEAR_TIE, first_difference
from .losslessness import WRONG, counted, plain_margin, sample_requests

LENGTHS = (1, 2, 3, 5, 8)
"""Of chains, and nodes of trees; the longest that a pass holds comes behind them."""


@dataclass(frozen=True)
class Way:
    """A way of drafting: by the draft `name`, or by its opposite."""

    name: str
    length: int
    nodes: int | None = None
    wrong: bool = False

    @property
    def label(self) -> str:
        """What it is called in a certificate."""
        return f"{WRONG} ({self.name})" if self.wrong else self.name

    @property
    def options(self) -> dict[str, Any]:
        """Of a request."""
        return {"draft": self.name, "draft_length": self.length, "draft_nodes": self.nodes}


def ways_to_draft(manifest: Manifest, drafts: Sequence[DraftInfo]) -> Iterator[Way]:
    """Chains and, where a draft proposes them and they are exact, trees of all sizes by every draft, and chains that are
    always wrong: on the trunk and by all segments, where there are such drafts."""
    most = manifest.widest_tree - 1
    lengths = sorted({min(length, most) for length in (*LENGTHS, most)})
    for draft in drafts:
        longest = draft.options.most_tokens or most
        for length in sorted({min(length, longest) for length in lengths}):
            yield Way(draft.name, length)
        if draft.options.offers_trees and manifest.exact_trees:
            for nodes in lengths[1:]:
                yield Way(draft.name, min((nodes + 1) // 2, longest), nodes)
    kinds = {draft.layer is None: draft for draft in reversed(drafts)}
    for draft in kinds.values():
        for length in sorted({min(length, draft.options.most_tokens or most) for length in lengths}):
            yield Way(draft.name, length, wrong=True)


def certify(
    bundle: Bundle,
    requests: int,
    max_new_tokens: int,
    images: Sequence[Any] = (),
    progress: Callable[[str, int, int], None] | None = None,
    device: str = "cpu",
) -> Certificate | None:
    """The certificate of a bundle on a device; None for one without a draft that the device runs."""
    manifest = bundle.manifest
    cases = list(sample_requests(manifest, requests, images))
    budget = min(max_new_tokens, manifest.limits.max_length // 2)
    with Session.load(bundle, device) as session:
        decoder = session.decoder
        engine = decoder.engine
        manifest = session.bundle.manifest  # its passes may all be of one width
        ways = list(ways_to_draft(manifest, runnable(manifest.drafts, engine.graphs)))
        if not ways:
            return None
        generate = counted(session, budget, "certificate", len(cases) * (1 + len(ways)), progress)
        plain = [generate(request, speculative=False).tokens for request in cases]
        differences: list[tuple[Way, int, int]] = []
        for way in ways:
            with always_wrong(session, way.name) if way.wrong else nullcontext():
                outputs = [generate(request, **way.options).tokens for request in cases]
            for number, (expected, tokens) in enumerate(zip(plain, outputs, strict=True)):
                at = first_difference(expected, tokens)
                if at is not None:
                    differences.append((way, number, at))
        margins = {
            (number, at): plain_margin(session, cases[number], at)
            for number, at in sorted({(number, at) for _, number, at in differences})
        }
        return Certificate(
            engine=engine.name, version=engine.version, machine=engine.machine, threads=session.threads or 1,
            date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            requests=len(cases), ways=len(ways), tokens=len(ways) * sum(map(len, plain)),
            least_width=decoder.passes.least_width, verify_width=manifest.verify_width,
            different=len(differences),
            first=None if not differences else _difference(*differences[0], margins),
            largest_margin=max((margin for margin in margins.values() if isfinite(margin)), default=None),
        )  # fmt: skip


def _difference(way: Way, number: int, at: int, margins: dict[tuple[int, int], float]) -> Difference:
    margin = margins[number, at]
    return Difference(
        draft=way.label, draft_length=way.length, draft_nodes=way.nodes, request=number, token=at,
        margin=margin if isfinite(margin) else None,
    )  # fmt: skip


def certificate_failures(certificate: Certificate, manifest: Manifest) -> list[str]:
    """What of a certificate breaks the rule, as sentences: any difference of a quantized target, whose passes can all give
    the same bits; of a float one those that are no near-ties."""
    first = certificate.first
    if first is None:
        return []
    near = first.margin is not None and (certificate.largest_margin or 0.0) < NEAR_TIE
    if manifest.target_weights is None and near:
        return []
    return [f"certificate: {certificate.sentence()}"]
