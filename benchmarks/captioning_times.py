"""Decode speed-up and samples per second of the bundles of `papers_medusa_captioning.py`; for an idle machine.

All arms take turns, in every round in another order: each bundle plainly and with its heads, one request after the other
and in batches.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from vlmexport.calibration.data import load_records
from vlmexport.runtime import Session
from vlmexport.runtime.measure.benchmark import time_passes
from vlmexport.runtime.measure.virtual_clock import decoding
from vlmexport.runtime.speedup.stats import Stats

from recipes.common.captioner import LONGEST

BATCH = 16
Measure = Callable[[], float]


def times(
    bundles: Mapping[str, tuple[Path, int]], scenes: int, samples: int, rounds: int, longest: int = LONGEST
) -> dict[str, dict[str, Any]]:
    """By name of a bundle, given with its number of heads: medians over `rounds`, with the least and the most.

    `decode` is the decode speed-up of `scenes` requests, one after the other; `samples_per_second` are whole requests, the
    picture included, of `samples` of which `BATCH` are decoded together, plainly and with heads, and `samples` is the
    ratio of the two; `bound` is what the graphs alone allow `decode` to be, by their times and the cycles of the requests.
    """
    pictures = [
        record.image.load()
        for record in load_records(f"scenes-captions:heldout:{max(scenes, samples)}")
        if record.image
    ]
    asked = [{"image": picture, "max_new_tokens": longest} for picture in pictures]
    with ExitStack() as stack:
        arms: dict[tuple[str, str, bool], Measure] = {}
        opened: dict[str, Session] = {}
        for name, (path, heads) in bundles.items():
            session = opened[name] = stack.enter_context(Session.load(path, max_batch=BATCH, picture_cache=0))
            for drafted in (False, True):
                how: dict[str, Any] = (
                    {"draft": "medusa", "draft_length": heads} if drafted else {"draft": "none"}
                )
                requests = [request | how for request in asked]
                arms[name, "decode", drafted] = partial(decode_rate, session, requests[:scenes])
                arms[name, "samples", drafted] = partial(sample_rate, session, requests[:samples])
        values = interleaved(arms, rounds)
        bounds = {name: bound(opened[name], heads, asked[:scenes]) for name, (_, heads) in bundles.items()}
    return {
        name: {
            "decode": ratios(values[name, "decode", True], values[name, "decode", False]),
            "bound": bounds[name],
            "samples": ratios(values[name, "samples", True], values[name, "samples", False]),
            "samples_per_second": {
                "plain": round(statistics.median(values[name, "samples", False]), 3),
                "heads": round(statistics.median(values[name, "samples", True]), 3),
            },
        }
        for name in bundles
    }


def decode_rate(session: Session, requests: list[dict[str, Any]]) -> float:
    """Decoded tokens per second of requests, one after the other; the first token of each is prefill's."""
    total = Stats.total(session.generate(**request).stats for request in requests)
    return (total.tokens - total.requests) / total.decode_seconds


def sample_rate(session: Session, requests: list[dict[str, Any]]) -> float:
    """Whole requests per second, decoded together."""
    begin = time.perf_counter()
    session.generate_batch(requests)
    return len(requests) / (time.perf_counter() - begin)


def interleaved(arms: Mapping[Any, Measure], rounds: int) -> dict[Any, list[float]]:
    """What every arm measured in every round, each round in another order; a round before these warms up."""
    shuffle, order = random.Random(0), list(arms)
    values: dict[Any, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            value = arms[name]()
            if turn:
                values[name].append(value)
    return values


def ratios(above: list[float], below: list[float]) -> dict[str, float]:
    """Median, least and most of the ratios round by round."""
    values = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def bound(session: Session, heads: int, requests: list[dict[str, Any]]) -> float:
    """Decode speed-up that the times of the graphs allow for the cycles of these requests, each decoded alone."""
    draft = session.bundle.manifest.choose_draft("medusa")
    assert draft is not None, "the bundle has heads"
    total = Stats.total(
        session.generate(**request, draft=draft.name, draft_length=heads).stats for request in requests
    )
    table, _ = time_passes(
        session, [draft], {heads + 1}, total.prompt_tokens / total.requests, total.tokens / total.requests
    )
    return round(decoding(table, draft.name, total).speedup, 3)
