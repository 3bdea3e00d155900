"""What the check of logits for NaN and infinity takes of a decoding cycle.

    vlmexport build --model tiny-blip2-flant5 -o runs/tiny
    python -m benchmarks.finite_check runs/tiny --save tiny

The check is too short to show in the time of a request. So the two are measured by themselves, in turns, round after
round, in time of the processor on one thread (others may use the machine meanwhile): a cycle, over whole requests less
what precedes their first, and one check, as `TargetLogits.best` with it less the same
without it (greedy), or `TargetLogits.check` (a row that is sampled or processed), on rows of logits as long as the
model's. The share is checks a cycle × the one ÷ the other; each round gives one.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

from benchmarks.intervals import shown, with_interval
from benchmarks.machine import save

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"speculative": False},
    "imitation, 5 drafted": {"draft": "imitation", "draft_length": 5},
    "early exit, 5 drafted": {"draft": "early-exit", "draft_length": 5},
    "plain, sampled": {"speculative": False, "temperature": 0.8, "seed": 1},
}


def checked(
    logits: Sequence[np.ndarray],
) -> tuple[Callable[[int], int], Callable[[int], int], Callable[[int], None]]:
    """`best` as the runtime has it, the same without its check, and `check`, over logits [V] in host memory."""
    from vlmexport.runtime.decoder.logits import TargetLogits

    made = TargetLogits.__new__(TargetLogits)
    made._logits_by_row, made._small = list(logits), {}

    def unchecked(self: Any, row: int) -> int:
        """`TargetLogits.best` up to the check."""
        logits = self._logits_by_row
        if logits is None:
            raise AssertionError
        return logits[row].argmax().item()

    return made.best, unchecked.__get__(made), made.check


def seconds(function: Callable[[int], object], num_logits: int, count: int) -> float:
    """Of one call."""
    begin = thread_time()
    for at in range(count):
        function(at % num_logits)
    return (thread_time() - begin) / count


def counts(session: Any, request: dict[str, Any]) -> tuple[Counter[str], int]:
    """How often one request asks for `best` and `check`, after its first token; and its cycles."""
    from vlmexport.runtime.decoder.logits import TargetLogits

    calls: Counter[str] = Counter()
    before = {name: getattr(TargetLogits, name) for name in ("best", "check")}

    def counting(name: str) -> Callable[..., Any]:
        def counted(self: Any, row: int) -> Any:
            calls[name] += 1
            return before[name](self, row)

        return counted

    for name in before:
        setattr(TargetLogits, name, counting(name))
    try:
        cycles = session.generate(**request).stats.cycles
    finally:
        for name, function in before.items():
            setattr(TargetLogits, name, function)
    return calls, cycles


def measure(session: Any, request: dict[str, Any], rounds: int, calls: int) -> dict[str, Any]:
    """Shares by round, and what they are made of."""
    vocabulary = session.bundle.manifest.text.vocab_size
    logits = list(np.random.default_rng(0).standard_normal((6, vocabulary), np.float32))
    best, unchecked, check = checked(logits)
    calls_by_check, cycles = counts(session, request)
    shares, cycle_us, check_us = [], [], []
    for _ in range(rounds):
        taken = []
        for limit in (request["max_new_tokens"], 1):  # the second for what comes before the first cycle
            begin = thread_time()
            session.generate(**request | {"max_new_tokens": limit})
            taken.append(thread_time() - begin)
        cycle = (taken[0] - taken[1]) / cycles
        # `best` twice, so that a clock that drifts meets both sides alike.
        one = seconds(best, len(logits), calls)
        without = seconds(unchecked, len(logits), 2 * calls)
        one = (one + seconds(best, len(logits), calls)) / 2
        spent = calls_by_check["best"] * (one - without) + calls_by_check["check"] * seconds(
            check, len(logits), calls
        )
        shares.append(spent / cycles / cycle)
        cycle_us.append(1e6 * cycle)
        check_us.append(1e6 * spent / cycles)
    return {
        "share": with_interval(shares),
        "cycle_us": with_interval(cycle_us),
        "checks_us_per_cycle": with_interval(check_us),
        "checks_per_cycle": (calls_by_check["best"] + calls_by_check["check"]) / cycles,
        "cycles": cycles,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=2000, help="checks timed in a round")
    parser.add_argument("--save", metavar="NAME")
    arguments = parser.parse_args()
    from vlmexport.runtime import Session
    from vlmexport.runtime.images.synthetic import synthetic_image

    with Session.load(arguments.bundle, threads=1) as session:
        image = session.bundle.manifest.image
        request: dict[str, Any] = {"max_new_tokens": 64, "ignore_eos": True}
        if image is not None:
            request["image"] = synthetic_image(image.height or 224, image.width or 224)
        by_way = {}
        for way, options in WAYS.items():
            by_way[way] = measure(session, request | options, arguments.rounds, arguments.calls)
            share = by_way[way]["share"]
            print(
                f"{way:<22} {by_way[way]['checks_us_per_cycle']['median']:6.2f} µs of {by_way[way]['cycle_us']['median']:8.0f} µs "
                f"a cycle: {shown(share, '.3%')}"
            )
    print(json.dumps(by_way, indent=1))
    if arguments.save:
        path = save(
            f"finite-check-{arguments.save}", {"script": "benchmarks/finite_check.py", "ways": by_way}
        )
        print(f"written to {path}")


if __name__ == "__main__":
    main()
