"""A day's work of a robot in minutes: one session serves thousands of mixed requests; nothing may grow, leak or drift.

    make soak REQUESTS=3000
    python -m tests.integration.soak.soak [BUNDLE] --requests 3000 --seed 0 [--save FILE.json]

Requests are drawn from a few dozen: with and without pictures, every draft of the bundle and none, greedy and sampled,
alone and in batches, some cancelled, past their deadline, stopped by a string, or refused. A request that was served
before must give the same tokens again; memory, open files and threads must not grow in the second half (bound calls are kept, at most 512 of them, which fills some MB at
first). The exit
status is 1 if anything of that failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests.support.programs import environment

GROWTH = 0.02
"""Share of the resident memory by which it may grow in the second half."""

SAMPLES = 40
"""How often memory is looked at."""


def requests_of(session: Any, rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Different requests that the bundle can serve."""
    import numpy as np

    drafts = ["none", *(draft.name for draft in session.bundle.manifest.drafts)]
    made = []
    for number in range(count):
        request: dict[str, Any] = {
            "max_new_tokens": rng.choice((1, 8, 24, 60)),
            "draft": rng.choice(drafts),
            "ignore_eos": rng.random() < 0.5,
            "adaptive": "request",
        }
        if session.bundle.manifest.image is not None:
            size = rng.choice(((96, 96), (41, 30), (300, 17)))
            request["image"] = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        if session.bundle.manifest.text.default_prompt is None or rng.random() < 0.5:
            request["prompt"] = rng.choice(
                ("a red cup", "describe the scene", "what is left of the blue box?")
            )
        if rng.random() < 0.4:
            request |= {"temperature": 0.8, "seed": number, "top_p": rng.choice((1.0, 0.9))}
        if rng.random() < 0.2:
            request["stop"] = rng.choice((" a", "e", "zzz"))
        if rng.random() < 0.3:
            request["draft_length"] = rng.choice((1, 3, 7))
        made.append(request)
    return made


class Soak:
    """A session under load, and what was seen."""

    def __init__(self, session: Any, seed: int):
        self.session, self.rng = session, random.Random(seed)
        self.requests = requests_of(session, random.Random(seed), 48)
        self.known: dict[int, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.drift: list[str] = []

    def step(self) -> int:
        """One call; returns how many requests it served."""
        kind = self.rng.choices(
            ("alone", "batch", "refused", "cancelled", "late", "left"), (10, 2, 1, 1, 1, 1)
        )[0]
        self.counts[kind] += 1
        number = self.rng.randrange(len(self.requests))
        request = self.requests[number]
        if kind == "alone":
            self._same(number, self.session.generate(**request).tokens)
        elif kind == "batch":
            numbers = [self.rng.randrange(len(self.requests)) for _ in range(self.rng.randrange(2, 9))]
            # Widths differ from those of single requests: near-ties may fall otherwise, so only the count is looked at.
            results = self.session.generate_batch([self.requests[n] for n in numbers])
            if len(results) != len(numbers):
                self.drift.append(f"a batch of {len(numbers)} gave {len(results)} results")
            return len(numbers)
        elif kind == "refused":
            self._refused()
        elif kind == "cancelled":
            timer = threading.Timer(self.rng.random() * 0.02, self.session.cancel)
            timer.start()
            self.session.generate(**request)
            timer.join()
        elif kind == "late":
            self.session.generate(**request, deadline=self.rng.random() * 0.01)
        else:
            stream = self.session.stream(**request)
            next(iter(stream), None)
            stream.close()
        return 1

    def _same(self, number: int, tokens: list[int]) -> None:
        if self.known.setdefault(number, tokens) != tokens:
            self.drift.append(f"request {number} gave other tokens than before")

    def _refused(self) -> None:
        from vlmexport.runtime.common.errors import VlmexportError

        bad: dict[str, Any] = self.rng.choice(
            (
                {"prompt": "cup " * 5000},
                {"draft": "no such draft"},
                {"image": "/nowhere.png"},
                {"max_new_tokens": 0},
            )
        )
        try:
            self.session.generate(**{"prompt": "a", **bad})
        except VlmexportError:
            return
        self.drift.append(f"{list(bad)} was not refused")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "bundle", type=Path, nargs="?", help="default: a tiny one with random weights is built"
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vlmexport-soak-") as folder:
        bundle = arguments.bundle or built(Path(folder))
        found = soak(bundle, arguments.requests, arguments.max_batch, arguments.seed)
    print(json.dumps(found, indent=1))
    if arguments.save:
        arguments.save.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["problems"] else 0


def built(folder: Path) -> Path:
    """A tiny captioner with random weights, built in a process of its own: what that leaves in memory is not the session's."""
    import subprocess

    code = (
        "import pathlib; from tests.support import tiny_bundles;"
        f"tiny_bundles.build('t5', pathlib.Path({str(folder)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, stdout=sys.stderr)
    return folder / "bundle"


def soak(bundle: Path, requests: int, max_batch: int, seed: int) -> dict[str, Any]:
    """Serve so many requests; what was seen, and `problems`, which should be empty."""
    from vlmexport.runtime import Session

    me = psutil.Process()
    begin = time.monotonic()
    samples: list[dict[str, int]] = []
    with Session.load(bundle, max_batch=max_batch, picture_cache=1) as session:
        running = Soak(session, seed)
        served, marks = 0, [round(requests * (at + 1) / SAMPLES) for at in range(SAMPLES)]
        while served < requests:
            served += running.step()
            while marks and served >= marks[0]:
                marks.pop(0)
                samples.append(
                    {"rss": me.memory_info().rss, "files": me.num_fds(), "threads": me.num_threads()}
                )
    warm = samples[SAMPLES // 2 :]
    problems = list(running.drift)
    growth = (warm[-1]["rss"] - warm[0]["rss"]) / warm[0]["rss"]
    if growth > GROWTH:
        problems.append(f"resident memory grew by {growth:.1%}")
    problems += [
        f"{what} grew from {warm[0][what]} to {warm[-1][what]}"
        for what in ("files", "threads")
        if warm[-1][what] > warm[0][what]
    ]
    return {
        "requests": served,
        "seed": seed,
        "calls": dict(running.counts),
        "seconds": round(time.monotonic() - begin, 1),
        "resident_bytes": {
            "after_half": warm[0]["rss"],
            "at_the_end": warm[-1]["rss"],
            "growth": round(growth, 4),
        },
        "open_files": warm[-1]["files"],
        "threads": warm[-1]["threads"],
        "problems": problems,
    }


if __name__ == "__main__":
    sys.exit(main())
