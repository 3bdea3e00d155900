"""How much of a decoding cycle is Python: 1 − time inside the engine / time of a cycle, and what the rest does.

    vlmexport build --model tiny-blip2-flant5 --draft-layer 3 -o runs/tiny
    python -m benchmarks.python_share runs/tiny

The engine's time is the sum over the calls of ONNX Runtime's C++ session; everything else is Python's, ONNX Runtime's
own Python package and what happens between two cycles (text, limits) included. A cycle lasts from its beginning to the
beginning of the next one; figures are medians over the cycles of all requests in which the thread kept its core (the
share of the others says how busy the machine was). Three arms take turns: the clock is read once a cycle; around the engine's calls too (the share); and
around every part. What measuring takes is timed on functions that do nothing, where it is cheapest, and subtracted: the
share is rather too high than too low.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import Any

from benchmarks.intervals import shown, with_interval
from benchmarks.machine import describe, save

ENGINE, BETWEEN = "engine", "between cycles: text, limits"
ROOT = "bookkeeping"
"""Part of a cycle that is no other part."""

LEVELS = ("cycles", "engine", "parts")
"""How much is measured."""


class Meter:
    """Time of wrapped functions by part and cycle: a part's time is without that of the parts that it calls."""

    def __init__(self) -> None:
        self.inside = self.around = 0.0
        self.cycles: list[tuple[defaultdict[str, float], Counter[tuple[str, str]]]] = []
        """Per cycle: seconds by part, and how often a part was entered from another."""
        self.interrupted = 0
        """Cycles that are left out: another program took the core."""
        self._open, self._part = False, BETWEEN
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._entries: Counter[tuple[str, str]] = Counter()
        self._switches, self._since = 0, 0.0
        self.inside, self.around = self._overhead()

    def begin(self) -> None:
        """A request: nothing is measured before its first cycle."""
        self._open, self._part = False, BETWEEN

    def root(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` is a cycle, which ends where the next one begins."""
        timed = self.wrap(function, ROOT)

        def cycle(*args: Any) -> Any:
            now, switches = perf_counter(), resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
            if self._open and switches == self._switches:
                self._seconds[BETWEEN] += now - self._since
                self.cycles.append((self._seconds, self._entries))
            elif self._open:
                self.interrupted += 1
            self._seconds, self._entries = defaultdict(float), Counter()
            self._switches, self._open = switches, True
            self._since = perf_counter()
            return timed(*args)

        return cycle

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`function`, timed as `part` within cycles."""

        def timed(*args: Any) -> Any:
            if not self._open:
                return function(*args)
            before, self._part = self._part, part
            self._entries[before, part] += 1
            begin = perf_counter()
            self._seconds[before] += begin - self._since
            self._since = begin
            try:
                return function(*args)
            finally:
                end = perf_counter()
                self._seconds[part] += end - self._since
                self._part, self._since = before, end

        return timed

    def corrected(self) -> list[dict[str, float]]:
        """Microseconds by part, cycle by cycle, without what measuring took."""
        by_part = []
        for seconds, entries in self.cycles:
            left = defaultdict(float, seconds)
            for (before, part), count in entries.items():
                left[part] -= count * self.inside
                left[before] -= count * self.around
            by_part.append({part: 1e6 * value for part, value in left.items()})
        return by_part

    def calls(self) -> float:
        """Mean calls of the engine per cycle."""
        return statistics.mean(sum(n for (_, part), n in e.items() if part == ENGINE) for _, e in self.cycles)

    def subtracted(self) -> float:
        """Mean microseconds per cycle that measuring took."""
        return 1e6 * (self.inside + self.around) * statistics.mean(sum(e.values()) for _, e in self.cycles)

    def _overhead(self, count: int = 20_000) -> tuple[float, float]:
        """Seconds that measuring adds to a part, and to the part around it, per call."""

        def nothing(one: object, two: object) -> None:
            """As cheap as a call gets."""

        def loop(function: Callable[..., None]) -> None:
            for _ in range(count):
                function(self, None)

        inside, around = [], []
        for _ in range(7):
            begin = perf_counter()
            loop(nothing)
            bare = (perf_counter() - begin) / count
            self.begin()
            self.root(loop)(self.wrap(nothing, "part"))
            inside.append(self._seconds["part"] / count - bare)
            around.append(self._seconds[ROOT] / count)
        return min(inside), min(around)


def places() -> list[tuple[Any, str, str]]:
    """What is wrapped to measure parts: owner, name and part."""
    from vlmexport.runtime.decoder.decoder import Decoder
    from vlmexport.runtime.decoder.forward_passes import ForwardPasses
    from vlmexport.runtime.decoder.logits import TargetLogits
    from vlmexport.runtime.drafts.imitation.self_draft import SelfDraft
    from vlmexport.runtime.engines.onnxruntime import _BoundCall
    from vlmexport.runtime.speculative import cycle
    from vlmexport.runtime.speculative.sequence import Sequence
    from vlmexport.runtime.text.incremental import IncrementalDetokenizer

    return [
        (cycle.Cycle, "_propose", "proposing"),
        (cycle, "draft_on_trunk", "proposing"),
        (SelfDraft, "step_logits", "proposing"),
        *((Decoder, name, "passes and their lookup") for name in ("begin_cycle", "trunk", "tail", "full", "head_of")),
        (TargetLogits, "run", "passes and their lookup"),
        (ForwardPasses, "_write_positions", "masks, positions, write indices"),
        (ForwardPasses, "_embed_tokens", "embedding"),
        (Sequence, "choose", "choosing drafts"),
        (Sequence, "judge", "accepting"),
        (Decoder, "accept_all", "accepting"),
        (_BoundCall, "run", "calling the engine"),
        (IncrementalDetokenizer, "push", "text"),
    ]  # fmt: skip


class Bench:
    """A session whose requests can be measured."""

    def __init__(self, session: Any, request: dict[str, Any]) -> None:
        self.session, self.request = session, request
        self._calls: dict[int, Any] = {}
        engine = session.decoder.engine
        bind = engine._bind

        def noted(*args: Any) -> Any:
            call = bind(*args)
            return self._calls.setdefault(id(call), call)

        engine._bind = noted

    def request_once(self, options: dict[str, Any]) -> int:
        """One request; its cycles."""
        return self.session.generate(**self.request, **options).stats.cycles

    @contextmanager
    def measured(self, meter: Meter, level: str) -> Iterator[None]:
        """Requests inside are measured by `meter`."""
        from vlmexport.runtime.speculative.cycle import Cycle

        changes: list[tuple[Any, str, Any]] = [(Cycle, "run", meter.root(Cycle.run))]
        if level != "cycles":
            changes += [(call, "_run", meter.wrap(call._run, ENGINE)) for call in self._calls.values()]
        if level == "parts":
            changes += [(owner, name, meter.wrap(vars(owner)[name], part)) for owner, name, part in places()]
        before = [getattr(owner, name) for owner, name, _ in changes]
        for owner, name, changed in changes:
            setattr(owner, name, changed)
        meter.begin()
        try:
            yield
        finally:
            meter.begin()
            for (owner, name, _), original in zip(changes, before, strict=True):
                setattr(owner, name, original)

    def instructions(self, options: dict[str, Any]) -> float:
        """Bytecode instructions per cycle: the same on a busy machine, for one version of Python."""
        from vlmexport.runtime.session.active_request import ActiveRequest

        count, start = 0, ActiveRequest.start

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal count
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            count += event == "opcode"
            return trace

        def started(running: Any) -> Any:
            sys.settrace(trace)
            return start(running)

        ActiveRequest.start = started  # type: ignore[method-assign]
        try:
            cycles = self.request_once(options)
        finally:
            sys.settrace(None)
            ActiveRequest.start = start  # type: ignore[method-assign]
        return count / cycles

    def run(self, options: dict[str, Any], rounds: int) -> dict[str, Any]:
        """Medians over the cycles of `rounds` turns of the three arms; microseconds per cycle."""
        for _ in range(3):
            self.request_once(options)
        meters = {level: Meter() for level in LEVELS}
        for _ in range(rounds):
            for level, meter in meters.items():
                with self.measured(meter, level):
                    self.request_once(options)
        cycles, engine, parts = (meters[level].corrected() for level in LEVELS)
        return {
            "unmeasured_cycle_us": statistics.median(sum(each.values()) for each in cycles),
            "cycle_us": statistics.median(sum(each.values()) for each in engine),
            "engine_us": statistics.median(each[ENGINE] for each in engine),
            "python_share": with_interval([1 - each[ENGINE] / sum(each.values()) for each in engine]),
            "parts_us": {
                part: statistics.median(each.get(part, 0.0) for each in parts)
                for part in sorted({part for each in parts for part in each} - {ENGINE})
            },
            "cycles": len(engine),
            "interrupted": meters["engine"].interrupted / (len(engine) + meters["engine"].interrupted),
            "calls_per_cycle": meters["engine"].calls(),
            "subtracted_us": {level: meters[level].subtracted() for level in ("engine", "parts")},
            "instructions_per_cycle": self.instructions(options),
        }


def show(way: str, report: dict[str, Any]) -> None:
    """One table."""
    share, cycle = report["python_share"], report["cycle_us"]
    print(f"\n{way}: a cycle takes {cycle:.0f} µs ({report['unmeasured_cycle_us']:.0f} µs where only cycles are measured), "
          f"calls the engine {report['calls_per_cycle']:.1f} times and runs {report['instructions_per_cycle']:.0f} bytecode "
          f"instructions\nPython's share is {shown(share, '.1%')}")  # fmt: skip
    rows = {ENGINE: report["engine_us"]} | dict(sorted(report["parts_us"].items(), key=lambda item: -item[1]))
    for part, value in rows.items():
        print(f"  {part:<36} {value:8.1f} µs {value / cycle:7.1%}")
    taken = report["subtracted_us"]
    print(f"  {report['cycles']} cycles; {report['interrupted']:.0%} were interrupted and do not count")
    print(f"  subtracted for measuring: {taken['engine']:.1f} µs, with parts {taken['parts']:.1f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompt")
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    options = parser.parse_args()
    from vlmexport.runtime import Session
    from vlmexport.runtime.images.synthetic import synthetic_image

    session = Session.load(options.bundle)
    manifest = session.bundle.manifest
    request: dict[str, Any] = {"prompt": options.prompt, "max_new_tokens": options.max_new_tokens}
    request["ignore_eos"] = True
    if manifest.image is not None:
        request["image"] = synthetic_image(manifest.image.height or 224, manifest.image.width or 224)
    bench = Bench(session, request)
    ways: dict[str, dict[str, Any]] = {"plain": {"speculative": False}}
    if manifest.policy.draft is not None:
        ways[f"d = {options.draft_length}"] = {"draft_length": options.draft_length}
    by_way = {way: bench.run(chosen, options.rounds) for way, chosen in ways.items()}
    result = {
        "script": "benchmarks/python_share.py",
        "bundle": manifest.model.source,
        "draft": manifest.policy.draft,
        "rounds": options.rounds,
        "ways": by_way,
    }
    if options.json:
        print(json.dumps({"machine": describe(), **result}, indent=1))
    else:
        for way, values in by_way.items():
            show(way, values)
        print("\n" + ", ".join(f"{name}: {value}" for name, value in describe().items()))
    if options.save:
        print(save(options.save, result))


if __name__ == "__main__":
    main()
