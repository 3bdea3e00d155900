"""Two versions of the runtime side by side: the same requests in turn, ratios with 95 % intervals.

    python benchmarks/against.py --python OTHER/.venv/bin/python --bundle OTHER_BUNDLE BUNDLE --image table.png

Each version runs in a process of its own, on a bundle that it built itself (formats differ between versions).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from typing import Any

from machine import describe, save

CHILD = """
import json, sys
from vlmexport.runtime import Session
bundle, request = sys.argv[1], json.loads(sys.argv[2])
session = Session.load(bundle)
for line in sys.stdin:
    options = json.loads(line)
    print(session.generate(**request, **options).stats.tokens_per_second, flush=True)
"""


class Arm:
    """One version, decoding one way."""

    def __init__(self, process: subprocess.Popen[str], options: dict[str, Any]) -> None:
        self._process, self._options = process, options
        self.rates: list[float] = []

    def run(self) -> float:
        """Decoded tokens per second of one request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._options) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def start(python: str, bundle: str, request: dict[str, Any]) -> subprocess.Popen[str]:
    """A version with its bundle loaded."""
    command = [python, "-c", CHILD, bundle, json.dumps(request)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ratio(one: Arm, other: Arm) -> dict[str, float]:
    """Median ratio of paired repeats, and a bootstrapped 95 % interval of it."""
    pairs = [a / b for a, b in zip(one.rates, other.rates, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {"median": statistics.median(pairs), "low": medians[50], "high": medians[1949]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", help="bundle of this version")
    parser.add_argument("--python", required=True, help="interpreter of the other version")
    parser.add_argument("--bundle", dest="other_bundle", required=True, help="bundle of the other version")
    parser.add_argument("--image")
    parser.add_argument("--prompt")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--draft", help="also compare with this draft, at --draft-length")
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    options = parser.parse_args()
    request = {"image": options.image, "prompt": options.prompt, "max_new_tokens": options.max_new_tokens}
    request["ignore_eos"] = True
    here = start(sys.executable, options.bundle, request)
    there = start(options.python, options.other_bundle, request)
    ways: dict[str, dict[str, Any]] = {"plain": {"speculative": False}}
    if options.draft:
        ways["speculative"] = {"draft": options.draft, "draft_length": options.draft_length}
    arms = {
        (who, way): Arm(process, ways[way])
        for way in ways
        for who, process in (("this", here), ("other", there))
    }
    for arm in arms.values():
        arm.run()
    for number in range(options.pairs):
        for arm in list(arms.values())[:: 1 if number % 2 else -1]:
            arm.rates.append(arm.run())
    result = {
        "script": "benchmarks/against.py",
        "pairs": options.pairs,
        "request": request,
        "tokens_per_second": {
            f"{who} {way}": statistics.median(arm.rates) for (who, way), arm in arms.items()
        },
        "this over other": {way: ratio(arms["this", way], arms["other", way]) for way in ways},
        "machine": describe(),
    }
    print(json.dumps(result, indent=1))
    if options.save:
        save(options.save, result)
    for process in (here, there):
        process.kill()


if __name__ == "__main__":
    main()
