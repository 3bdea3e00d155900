"""Two versions of the runtime side by side: the same requests in turn, ratios with 95 % intervals.

    python -m benchmarks.against --python OTHER/.venv/bin/python --bundle OTHER_TINY TINY --image table.png \\
        --draft imitation@3
    python -m benchmarks.against --python OTHER/.venv/bin/python --bundle OTHER_SMOLLM2 SMOLLM2 \\
        --prompt "Tell me about the sea." --max-new-tokens 32

Each version runs in a process of its own, on a bundle that it built itself (formats differ between versions). The
outputs of both must be the same. `rate` is decoded tokens per second; `work` is decoded tokens per second of processor
time, which says more on a machine that others use. Ratios above 1 are in favour of this version.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.intervals import shown, with_interval
from benchmarks.machine import describe, save

CHILD = """
import json, sys
from time import process_time
from vlmexport.runtime import Session
bundle, request = sys.argv[1], json.loads(sys.argv[2])
session = Session.load(bundle)
for line in sys.stdin:
    begin = []  # processor time at the first piece of text
    result = session.generate(**request, **json.loads(line), on_text=lambda _: begin or begin.append(process_time()))
    end, tokens = process_time(), list(map(int, result.tokens))
    work = (len(tokens) - 1) / max(end - begin[0], 1e-9) if begin else 0.0
    print(json.dumps({"rate": result.stats.tokens_per_second, "work": work, "tokens": tokens}), flush=True)
"""

MEASURES = ("rate", "work")


class Arm:
    """One version, decoding one way."""

    def __init__(self, process: subprocess.Popen[str], options: dict[str, Any]) -> None:
        self._process, self._options = process, options
        self.values: dict[str, list[float]] = {measure: [] for measure in MEASURES}
        self.tokens: list[int] = []

    def run(self) -> None:
        """One request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._options) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a version ended with status {self._process.wait()}; its error is above")
        report = json.loads(line)
        self.tokens = report["tokens"]
        for measure in MEASURES:
            self.values[measure].append(report[measure])

    def forget(self) -> None:
        """The runs so far were to warm up."""
        for values in self.values.values():
            values.clear()

    def median(self, measure: str) -> float:
        return statistics.median(self.values[measure])


def start(python: str, bundle: str, request: dict[str, Any]) -> subprocess.Popen[str]:
    """A version with its bundle loaded."""
    command = [python, "-c", CHILD, bundle, json.dumps(request)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ratio(one: Arm, other: Arm, measure: str) -> dict[str, float | None]:
    """Median ratio of paired repeats, and a bootstrapped 95 % interval of it."""
    return with_interval([a / b for a, b in zip(one.values[measure], other.values[measure], strict=True)])


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
    try:
        for _ in range(2):
            for arm in arms.values():
                arm.run()
        for arm in arms.values():
            arm.forget()
        for number in range(options.pairs):
            for arm in list(arms.values())[:: 1 if number % 2 else -1]:
                arm.run()
    finally:
        for process in (here, there):
            process.kill()
            process.wait()
    result = {
        "script": "benchmarks/against.py",
        "pairs": options.pairs,
        "request": request,
        "same_output": len({tuple(arm.tokens) for arm in arms.values()}) == 1,
        "tokens_per_second": {f"{who} {way}": arm.median("rate") for (who, way), arm in arms.items()},
        "this_over_other": {
            way: {measure: ratio(arms["this", way], arms["other", way], measure) for measure in MEASURES}
            for way in ways
        },
    }
    for way, ratios in result["this_over_other"].items():
        for measure, values in ratios.items():
            print(f"{way}, {measure}: {shown(values)}")
    print(json.dumps({"machine": describe(), **result}, indent=1))
    if options.save:
        print(save(options.save, result))
    if not result["same_output"]:
        sys.exit("the outputs differ")


if __name__ == "__main__":
    main()
