"""A scheduler against `generate_batch`, and how long those who decode stand still when a request comes.

    vlmexport build --model tiny-blip2-flant5 --max-batch 16 -o runs/tiny
    python -m benchmarks.scheduler runs/tiny

Throughput: the same requests, decoded together by `generate_batch`, and streamed by a scheduler that gets all of them at
once; the arms take turns, and the session lays prompts out in one arm, other threads in the other. Gaps: all places but one
decode without an end, and requests come one by one. A gap is the time between two cycles of those who decode: `usual` while
nobody comes, and `longest` of each arrival, which may hold one part of its prefill beside a cycle.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

from benchmarks.batch import requests
from benchmarks.intervals import with_interval
from benchmarks.machine import save

ARRIVALS = 12
PAUSE = 25
"""Cycles between two arrivals."""


def tokens_per_second(session: Any, asked: list[dict[str, Any]], scheduled: bool) -> tuple[float, list[Any]]:
    """Of all requests together, and their tokens."""
    from vlmexport.runtime import Scheduler

    if not scheduled:
        begin = time.perf_counter()
        results = session.generate_batch(asked)
        seconds = time.perf_counter() - begin
    else:
        with Scheduler(session) as scheduler:
            begin = time.perf_counter()
            tickets = [scheduler.submit(request, on_text=lambda text: None) for request in asked]
            results = [ticket.result() for ticket in tickets]
            seconds = time.perf_counter() - begin
    tokens = [list(result.tokens) for result in results]
    return sum(map(len, tokens)) / seconds, tokens


def gaps(session: Any, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """In milliseconds. The longest gap of an arrival is compared with the longest part of its prefill and a cycle."""
    from vlmexport.runtime import Scheduler
    from vlmexport.runtime.session.continuous_batch import ContinuousBatch

    times: list[float] = []
    prefill = ContinuousBatch.prefill

    def timed(batch: ContinuousBatch, whole: bool = False) -> None:
        began, beginning = time.perf_counter(), batch.is_beginning
        prefill(batch, whole)
        if beginning:
            times.append(time.perf_counter() - began)

    ContinuousBatch.prefill = timed  # type: ignore[method-assign]
    heard: list[float] = []
    length = session.bundle.manifest.limits.max_length
    endless = {"max_new_tokens": length, "ignore_eos": True, "speculative": False}
    usual: list[float] = []
    longest: list[float] = []
    parts: list[float] = []
    for number in range(ARRIVALS):
        with Scheduler(session) as scheduler:
            first = scheduler.submit(
                {**asked[0], **endless}, on_text=lambda text: heard.append(time.perf_counter())
            )
            others = [scheduler.submit({**each, **endless}) for each in asked[1 : session.max_batch - 1]]
            while scheduler.waiting or scheduler.running < session.max_batch - 1:
                time.sleep(0.001)
            heard.clear()
            while len(heard) < PAUSE:
                time.sleep(0.001)
            before = len(heard)
            times.clear()
            late = scheduler.submit({**asked[-1 - number % 3], **endless, "max_new_tokens": 2})
            late.result()
            after = len(heard)
            for ticket in (first, *others):
                ticket.cancel()
        spans = [1e3 * (b - a) for a, b in itertools.pairwise(heard[2:])]
        usual += spans[: before - 3]
        longest.append(max(spans[max(0, before - 4) : after]))
        parts.append(1e3 * max(times))
    ContinuousBatch.prefill = prefill  # type: ignore[method-assign]
    cycle = statistics.median(usual)
    return {
        "running": session.max_batch - 1,
        "usual_ms": round(cycle, 2),
        "longest_ms": round(statistics.median(longest), 2),
        "longest_part_of_prefill_ms": round(statistics.median(parts), 2),
        "longest_less_part_and_cycle_ms": round(
            statistics.median(a - b - cycle for a, b in zip(longest, parts, strict=True)), 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    from vlmexport.runtime import Session

    with Session.load(options.bundle, max_batch=16, picture_cache=0) as session:
        asked = requests(session.bundle.manifest, 48, options.tokens)
        want = tokens_per_second(session, asked, scheduled=False)[1]
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.repeats):
            for scheduled in (number % 2 == 0, number % 2 == 1):
                rate, tokens = tokens_per_second(session, asked, scheduled)
                assert tokens == want, "other tokens"
                rates[scheduled].append(rate)
        result = {
            "script": "benchmarks/scheduler.py",
            "model": session.bundle.manifest.model.source,
            "requests": len(asked),
            "repeats": options.repeats,
            "generate_batch_tokens_per_second": round(statistics.median(rates[False])),
            "scheduler_tokens_per_second": round(statistics.median(rates[True])),
            "scheduler_over_generate_batch": with_interval(
                [a / b for a, b in zip(rates[True], rates[False], strict=True)]
            ),
            "gaps": gaps(session, asked),
        }
    print(json.dumps(result, indent=1))
    if not options.no_save:
        print(save("scheduler", result))


if __name__ == "__main__":
    main()
