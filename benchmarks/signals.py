"""Whether what a program's signal handler raises leaves a request as it is, and the session serves the next one.

    python -m benchmarks.signals runs/tiny-vit-gpt2 runs/tiny-blip2-flant5 runs/tiny-qwen2.5-vl --signals 300 --save

The signals come at random moments of requests with every draft and none, greedy and sampled, whole, streamed and in
batches. The handler raises exceptions of five kinds; which one arrives is compared by identity. Behind each stands a request that
was not interrupted, whose tokens are compared with those from before the first signal.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import save


class Late(Exception):
    """As a program defines one for a request that takes too long."""


class Stop(BaseException):
    """As a program ends itself."""


KINDS: tuple[type[BaseException], ...] = (Late, RuntimeError, ValueError, TimeoutError, Stop)


class Alarm:
    """Raises an exception at a moment of a call; `raised` is the one that was raised."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._kind: type[BaseException] = Late
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, *_: object) -> None:
        self.raised = self._kind("the time is over")
        raise self.raised

    def during(self, call: Callable[[], object], seconds: float, kind: type[BaseException]) -> str:
        """How a call went during which the alarm rings after `seconds`."""
        self.raised, self._kind = None, kind
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-5))
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if error is self.raised:
                return "arrived"
            return f"another arrived: {type(error).__name__}: {error!s:.120}"
        return "finished before the signal" if self.raised is None else "nothing arrived"


def requests_of(session: Any, rng: random.Random) -> dict[str, Callable[[], list[list[int]]]]:
    """Calls of a session by name; each gives tokens."""
    from vlmexport.runtime.images.synthetic import synthetic_image

    about: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    if session.bundle.manifest.image is not None:
        image = session.bundle.manifest.image
        about["image"] = synthetic_image(image.height or 112, image.width or 112)
    drafts = ["none", *(draft.name for draft in session.bundle.manifest.drafts)]
    ways = {
        "greedy": {},
        "sampled": {"temperature": 0.8, "seed": rng.randrange(1000)},
        "drawn": {"temperature": 0.8, "seed": 5, "draft_sampling": "drawn", "adaptive": "request"},
        "length 4": {"draft_length": 4},
    }
    calls: dict[str, Callable[[], list[list[int]]]] = {}
    for draft in drafts:
        for way, options in ways.items():
            if draft == "none" and way in ("drawn", "length 4"):
                continue
            asked = about | options | {"draft": draft}
            calls[f"{draft}, {way}"] = lambda asked=asked: [session.generate(**asked).tokens]
        calls[f"{draft}, streamed"] = lambda asked=about | {"draft": draft}: [_streamed(session, asked)]
        calls[f"{draft}, batch"] = lambda asked=about | {"draft": draft}: _batch(session, asked)
    if session.bundle.manifest.text.chat_template:
        calls["two turns"] = lambda: _turns(session, about)
    return calls


def _streamed(session: Any, asked: dict[str, Any]) -> list[int]:
    stream = session.stream(**asked)
    for _ in stream:
        pass
    return stream.result.tokens


def _batch(session: Any, asked: dict[str, Any]) -> list[list[int]]:
    many = [asked | {"max_new_tokens": count} for count in (8, 20, 12)]
    return [result.tokens for _, result in sorted(session.generate_many(many), key=lambda pair: pair[0])]


def _turns(session: Any, about: dict[str, Any]) -> list[list[int]]:
    talk, options = session.chat(), {name: value for name, value in about.items() if name != "image"}
    first = talk.say("What is there?", about.get("image"), **options)
    return [first.tokens, talk.say("And beside it?", **options).tokens]


def measure(bundle: Path, signals: int, rng: random.Random) -> tuple[Counter[str], Counter[str]]:
    """(how requests ended during which a signal came, how the requests behind them were), for one bundle."""
    from vlmexport.runtime import Session

    ended: Counter[str] = Counter()
    behind: Counter[str] = Counter()
    with Session.load(bundle, max_batch=2) as session:
        calls = requests_of(session, rng)
        names, expected, taken = list(calls), {}, {}
        for name, call in calls.items():
            call()
            begin = time.perf_counter()
            expected[name] = call()
            taken[name] = time.perf_counter() - begin
        alarm = Alarm()
        while sum(ended.values()) - ended["finished before the signal"] < signals:
            name, kind = rng.choice(names), rng.choice(KINDS)
            how = alarm.during(calls[name], rng.uniform(0, taken[name]), kind)
            ended[how] += 1
            if how not in ("arrived", "finished before the signal"):
                print(f"{bundle.name}: {name}, {kind.__name__}: {how}")
            follower = rng.choice(names)
            try:
                right = calls[follower]() == expected[follower]
                outcome = "right" if right else "other tokens"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error!s:.120}"
            behind[outcome] += 1
            if outcome != "right":
                print(f"{bundle.name}: {follower} behind {name}, {kind.__name__}, {how}: {outcome}")
    return ended, behind


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Exceptions of signal handlers, at random moments of requests."
    )
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--signals", type=int, default=300, help="that come before their request has ended")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    count = len(arguments.bundles)
    shares = [arguments.signals // count + (at < arguments.signals % count) for at in range(count)]
    measurements = {}
    for bundle, signals in zip(arguments.bundles, shares, strict=True):
        ended, behind = measure(bundle, signals, rng)
        measurements[bundle.name] = {"requests": dict(ended), "next_requests": dict(behind)}
        print(bundle.name, dict(ended), "behind them:", dict(behind))
    if arguments.save:
        result = {"script": "benchmarks/signals.py", "seed": arguments.seed, "bundles": measurements}
        print(f"written to {save('signals', result)}")


if __name__ == "__main__":
    main()
