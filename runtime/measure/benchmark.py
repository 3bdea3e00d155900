"""Plain against speculative decoding: interleaved, medians, with the bound that the graphs' own times allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..bundle.stored_costs import StoredCosts, with_combinations
from ..common.errors import OptionError
from ..session.widths import kernels_of
from ..speedup.cost_model import CostTable
from .benchmark_report import Arm, engine_of, report_of
from .pass_costs import runnable
from .timing import GraphTimer

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo, Manifest
    from ..session.session import Result, Session

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Widths q of the T(q) table, up to the bundle's max_width."""

DEFAULT_PROMPT = "Describe what a robot has to know before it clears a table."
"""For text models whose bundle has no default prompt."""

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, steps done, steps in all."""


@dataclass(frozen=True)
class Request:
    """One image and prompt to measure; `name` is how reports call it."""

    name: str
    image: Any = None
    prompt: Any = None


def measure(
    session: Session,
    requests: Sequence[Request],
    *,
    options: dict[str, Any],
    shared: dict[str, Any],
    repeats: int = 5,
    every_draft: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure and return the report (schema: `schemas/bench-1.json`). Inside `forced_acceptance` drafts are accepted at its rate.

    `options` are the speculative arm's keyword arguments of `Session.generate`, `shared` those of both, `max_new_tokens`
    among them. Each repeat decodes every
    request plainly, then speculatively, so that both arms meet the same state of the machine. `every_draft` times
    the passes of all drafts of the bundle: then the report's `costs` is an entry for the manifest, else null.
    Raises `OptionError` when there is nothing to compare.
    """
    plain_options: dict[str, Any] = {**shared, "speculative": False}
    manifest = session.bundle.manifest
    draft = drafting(manifest, options)
    draft_options = {
        **shared,
        **options,
        "draft": draft.name,
        "speculative": True,
    }
    forced = session._forced_acceptance
    if forced is not None:
        # Random weights rarely emit the end token, and forced drafts must not end the output by chance.
        draft_options["ignore_eos"] = plain_options["ignore_eos"] = True
    plain, speculative = Arm(), Arm()
    steps = 1 + repeats  # the first warms up
    identical, results, references = True, [], []
    for step in range(steps):
        progress("decoding", step, steps)
        references, plain_seconds = _run(session, requests, plain_options)
        results, seconds = _run(session, requests, draft_options)
        identical &= all(list(a.tokens) == list(b.tokens) for a, b in zip(references, results, strict=True))
        if step:
            plain.add(references, plain_seconds)
            speculative.add(results, seconds)
    if not any(plain.tokens):
        raise OptionError("every request ended after one token: nothing was decoded; raise --max-new-tokens")
    progress("timing graphs", 0, 1)
    drafts = runnable(manifest.drafts, session.decoder.engine.graphs) if every_draft else [draft]
    length = options.get("draft_length")
    draft_length = manifest.policy.draft_length if length is None else length
    nodes = options.get("draft_nodes") or manifest.policy.draft_nodes or draft_length
    table, cache_len = time_passes(
        session,
        drafts,
        {draft_length + 1, nodes + 1},
        statistics.mean(result.stats.prompt_tokens for result in references),
        statistics.mean(len(result.tokens) for result in references),
    )
    known = with_combinations(table, manifest.drafts)
    report = report_of(
        session,
        [request.name for request in requests],
        results,
        known,
        plain,
        speculative,
        draft,
        draft_options,
    )
    return report | {
        "forced_acceptance": forced,
        "output_is_text": forced is None,
        "identical": identical
        if options.get("draft_sampling", "match") == "match" and not (forced is not None or report["lossy"])
        else None,
        "costs": measured_costs(session, table, cache_len).to_json() if every_draft else None,
    }


def _run(
    session: Session, requests: Sequence[Request], options: dict[str, Any]
) -> tuple[list[Result], list[float]]:
    results, seconds = [], []
    for request in requests:
        begin = time.perf_counter()
        results.append(session.generate(image=request.image, prompt=request.prompt, **options))
        seconds.append(time.perf_counter() - begin)
    return results, seconds


def drafting(manifest: Manifest, options: dict[str, Any]) -> DraftInfo:
    """The draft that `options` select; where the bundle decodes plainly by default, its policy's or its first draft.
    Raises `OptionError` when there is none."""
    name = options.get("draft")
    draft = manifest.choose_draft(name)
    if name is None and draft is None and manifest.drafts:
        draft = manifest.draft(manifest.policy.draft or "") or manifest.drafts[0]
    if draft is None:
        raise OptionError("this bundle has no draft, so there is nothing to compare plain decoding with")
    return draft


def time_passes(
    session: Session, drafts: Sequence[DraftInfo], widths: Iterable[int], prompt: float, tokens: float
) -> tuple[CostTable, int]:
    """Pass times at the middle of an output of `tokens` after a prompt of `prompt`, at the usual and at these widths;
    and the cache length there."""
    manifest = session.bundle.manifest
    widest = manifest.limits.max_width
    widths = {width for width in (*WIDTHS, *widths) if width <= widest}
    cache_len = round(tokens) // 2
    if not manifest.decoder.cross_attention:
        cache_len += round(prompt)
    engine = engine_of(session)
    timer = GraphTimer(session.bundle, engine, cache=cache_len, source=round(prompt))
    return timer.costs(drafts, widths), cache_len


def measured_costs(session: Session, table: CostTable, cache_len: int) -> StoredCosts:
    """An entry for the manifest: the table, when and where it was measured, and at which cache length."""
    date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    engine = engine_of(session)
    entry = StoredCosts.of(table, engine.machine, session.threads or 1, date, cache_len)
    if session.least_width is None:
        return entry
    return replace(entry, least_width=session.least_width, kernels=kernels_of(engine))
