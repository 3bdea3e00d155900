"""Plain against speculative decoding: interleaved, medians, with the bound that the graphs' own times allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import OptionError
from .machine import describe
from .speed_model import cycle_seconds, expected_tokens
from .timing import GraphTimer

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo, Manifest
    from ..session import Result, Session
    from ..speculate.stats import Stats

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


@dataclass
class Arm:
    """One way of decoding: per repeat, sums over the requests."""

    tokens: list[int] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)

    def add(self, results: Sequence[Result], seconds: Sequence[float]) -> None:
        """Take one repeat. Decoding starts at the first token, which prefill gives."""
        first = sum(result.stats.time_to_first_token for result in results)
        self.tokens.append(sum(len(result.tokens) - 1 for result in results))
        self.first_seconds.append(first)
        self.decode_seconds.append(sum(seconds) - first)

    @property
    def rates(self) -> list[float]:
        """Decoded tokens per second of each repeat."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.decode_seconds, strict=True)]

    @property
    def totals(self) -> list[float]:
        """Seconds of each repeat, image and prompt included."""
        return [a + b for a, b in zip(self.first_seconds, self.decode_seconds, strict=True)]

    def report(self) -> dict[str, Any]:
        """Medians, and the range of the rate."""
        rates = self.rates
        return {
            "tokens_per_second": statistics.median(rates),
            "tokens_per_second_min": min(rates),
            "tokens_per_second_max": max(rates),
            "seconds": statistics.median(self.totals),
            "seconds_to_first_token": statistics.median(self.first_seconds),
        }


def synthetic_image(height: int, width: int) -> np.ndarray:
    """A uint8 image [H, W, 3] for measurements without a picture: smooth colour with three blocks."""
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([200 + 20 * x / width, 190 + 20 * y / height, 180 + 0 * x], axis=-1).astype(np.uint8)
    for index, colour in enumerate([(200, 40, 40), (40, 80, 200), (60, 160, 60)]):
        left = width * (1 + 3 * index) // 10
        picture[height // 3 : height * 2 // 3, left : left + width // 6] = colour
    return picture


def measure(
    session: Session,
    requests: Sequence[Request],
    *,
    options: dict[str, Any],
    max_new_tokens: int,
    repeats: int = 5,
    warm_up: int = 1,
    force_acceptance: float | None = None,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure and return the report (schema: `schemas/bench-1.json`).

    `options` are the speculative arm's keyword arguments of `Session.generate`. Each repeat decodes every
    request plainly, then speculatively, so that both arms meet the same state of the machine.
    Raises `OptionError` when there is nothing to compare.
    """
    plain_options = {"max_new_tokens": max_new_tokens, "speculative": False}
    draft = drafting(session.bundle.manifest, options)
    draft_options = {"max_new_tokens": max_new_tokens, **options, "draft": draft.name, "speculative": True}
    if force_acceptance is not None:
        # Random weights rarely emit the end token, and forced drafts must not end the output by chance.
        draft_options |= {"force_acceptance": force_acceptance, "ignore_eos": True}
        plain_options["ignore_eos"] = True
    plain, speculative = Arm(), Arm()
    steps = warm_up + repeats
    identical, results, references = True, [], []
    for step in range(steps):
        progress("decoding", step, steps)
        references, plain_seconds = _run(session, requests, plain_options)
        results, seconds = _run(session, requests, draft_options)
        identical &= all(list(a.tokens) == list(b.tokens) for a, b in zip(references, results, strict=True))
        if step >= warm_up:
            plain.add(references, plain_seconds)
            speculative.add(results, seconds)
    if not any(plain.tokens):
        raise OptionError("every request ended after one token: nothing was decoded; raise --max-new-tokens")
    progress("timing graphs", 0, 1)
    report = _report(session, requests, results, references, plain, speculative, draft, draft_options)
    forced = force_acceptance is not None
    return report | {
        "forced_acceptance": force_acceptance,
        "output_is_text": not forced,
        "identical": None if forced else identical,
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


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _report(
    session: Session,
    requests: Sequence[Request],
    results: Sequence[Result],
    references: Sequence[Result],
    plain: Arm,
    speculative: Arm,
    draft: DraftInfo,
    options: dict[str, Any],
) -> dict[str, Any]:
    manifest = session.bundle.manifest
    length = options.get("draft_length", manifest.policy.draft_length)
    stats = [result.stats for result in results]
    alphas, alpha = acceptance(stats)
    decode = _ratios(speculative.rates, plain.rates)
    end_to_end = _ratios(plain.totals, speculative.totals)
    costs, bound = _bound(session, draft, length, alphas, references)
    achieved = statistics.median(decode)
    return {
        "schema_version": 1,
        "bundle": str(session.bundle.path),
        "model": manifest.model.source,
        "precision": manifest.weights_dtype,
        "draft": {"name": draft.name, "kind": draft.kind, "layer": draft.layer, "trained": draft.trained},
        "draft_length": length,
        "max_new_tokens": options["max_new_tokens"],
        "repeats": len(plain.tokens),
        "requests": [
            {"name": request.name, "tokens": len(result.tokens), "finish_reason": result.finish_reason}
            for request, result in zip(requests, results, strict=True)
        ],
        "plain": plain.report(),
        "speculative": speculative.report(),
        "speedup": {
            "decode": achieved,
            "decode_min": min(decode),
            "decode_max": max(decode),
            "end_to_end": statistics.median(end_to_end),
        },
        "tau": _tau(stats),
        "alpha": alpha,
        "alpha_by_depth": alphas,
        "width_cost": {str(width): seconds / costs.plain[1] for width, seconds in costs.plain.items()},
        "passes": {
            "plain": {str(width): seconds for width, seconds in costs.plain.items()},
            "tail": {str(width): seconds for width, seconds in costs.tail.items()},
            "trunk": costs.trunk,
            "propose": costs.propose,
        },
        "bound": bound,
        "achieved": None if bound is None else achieved / bound["decode"],
        "machine": describe(),
    }


def drafting(manifest: Manifest, options: dict[str, Any]) -> DraftInfo:
    """The draft that `options` select. Raises `OptionError` when the bundle has none."""
    name = (
        options.get("draft") or manifest.policy.draft or next((draft.name for draft in manifest.drafts), None)
    )
    found = None if name is None else manifest.draft(name)
    if found is None:
        raise OptionError("this bundle has no draft, so there is nothing to compare plain decoding with")
    return found


def acceptance(stats: Sequence[Stats]) -> tuple[list[float], float | None]:
    """alpha by depth (1 first; up to the last depth that was evaluated) and overall: accepted / evaluated."""
    accepted = _add([entry.accepted_by_depth for entry in stats])
    evaluated = _add([entry.evaluated_by_depth for entry in stats])
    by_depth = [a / e for a, e in zip(accepted, evaluated, strict=False) if e]
    return by_depth, sum(accepted) / sum(evaluated) if sum(evaluated) else None


def _add(lists: Sequence[Sequence[int]]) -> list[int]:
    total = [0] * max((len(values) for values in lists), default=0)
    for values in lists:
        for index, value in enumerate(values):
            total[index] += value
    return total


def _tau(stats: Sequence[Stats]) -> float | None:
    cycles = sum(entry.cycles for entry in stats)
    return (sum(entry.accepted for entry in stats) + cycles) / cycles if cycles else None


def _bound(
    session: Session, draft: DraftInfo, length: int, alphas: list[float], references: Sequence[Result]
) -> tuple[Any, dict[str, Any] | None]:
    """Pass times at the middle of an output, and what they allow at the measured acceptance."""
    manifest = session.bundle.manifest
    widest = manifest.limits.max_width
    widths = {width for width in (*WIDTHS, length + 1) if width <= widest}
    prompt = round(statistics.mean(result.stats.prompt_tokens for result in references))
    rows = round(statistics.mean(len(result.tokens) for result in references)) // 2
    if not manifest.decoder.cross_attention:
        rows += prompt
    engine = session.decoder.engine  # pyright: ignore[reportOptionalMemberAccess]
    timer = GraphTimer(session.bundle, engine, cache=rows, source=prompt)
    costs = timer.costs(draft.layer, draft.graphs.get("imitation"), widths)
    if not alphas or length + 1 not in costs.tail:
        return costs, None
    expected, seconds = expected_tokens(alphas, length), cycle_seconds(costs, length)
    return costs, {
        "decode": expected * costs.plain[1] / seconds,
        "tokens_per_cycle": expected,
        "cycle_seconds": seconds,
        "token_seconds": costs.plain[1],
    }
