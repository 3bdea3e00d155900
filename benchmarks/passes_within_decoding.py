"""What a pass takes within decoding and what it takes when it is repeated: why decoding falls short of a bound made of timed
passes.

    python -m benchmarks.passes_within_decoding tiny-vit-gpt2 --draft medusa --data scenes-captions:heldout

Requests are decoded plainly and with the draft's longest chain in turn, every graph's run timed; right after each request its
last pass of the layers is repeated. On the CPU engine. Writes results/passes-within-decoding-NAME.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

from vlmexport.calibration.calibrate import read_requests
from vlmexport.runtime import Session
from vlmexport.runtime.engines.base import Call
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu
from vlmexport.runtime.speedup.stats import Stats

from benchmarks.machine import save

REPEATS = 40


class Timed:
    """A call whose runs are noted, by graph, while `into` is a list."""

    into: list[tuple[str, float]] | None = None

    def __init__(self, graph: str, call: Call, last: dict[str, Timed]) -> None:
        self.graph, self.call, self.last = graph, call, last

    def run(self) -> None:
        begin = perf_counter()
        self.call.run()
        if Timed.into is not None:
            Timed.into.append((self.graph, perf_counter() - begin))
            self.last[self.graph] = self


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", default="medusa")
    parser.add_argument("--data", default="scenes:heldout")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    last: dict[str, Timed] = {}
    bound = OnnxRuntimeCpu._bound_call
    OnnxRuntimeCpu._bound_call = lambda self, graph, *views: Timed(graph, bound(self, graph, *views), last)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle"
        # By a process of its own: the threads that a build starts would serve the session, too.
        words = [sys.executable, "-m", "vlmexport", "build", "--model", options.model, "-o", str(path)]
        subprocess.run([*words, "--draft", options.draft, "--quiet"], check=True)
        with Session.load(path) as session:
            heads = session.bundle.manifest.draft(options.draft)
            assert heads is not None
            ways: dict[str, dict[str, Any]] = {
                "plain": {"draft": "none"},
                options.draft: {"draft": options.draft, "draft_length": heads.options.most_tokens or 4},
            }
            requests = read_requests(session.bundle.manifest, [options.data], options.requests)
            by_way = {name: Way() for name in ways}
            for number, request in enumerate([*requests[:2], *requests]):  # the first two warm up
                for name, how in ways.items():
                    one = measured(session, {**request, **how}, options.max_new_tokens, last)
                    if number >= 2:
                        by_way[name].add(*one)
    rows = {name: way.row() for name, way in by_way.items()}
    for name, row in rows.items():
        print(
            f"{name}: {row['cycle_ms']:.3f} ms a cycle, of it {row['graphs_ms']:.3f} in graphs; the layers "
            f"{row['layers_within_ms']:.3f} ms within decoding, {row['layers_repeated_ms']:.3f} repeated: "
            f"{row['layers_within_ms'] / row['layers_repeated_ms']:.2f} times as long"
        )
    plain, drafted = rows["plain"], rows[options.draft]
    gain = drafted["tau"] * plain["cycle_ms"] / drafted["cycle_ms"]
    inside = drafted["tau"] * plain["graphs_ms"] / drafted["graphs_ms"]
    repeated = gain_repeated(plain, drafted)
    print(
        f"{options.draft}: {gain:.2f} times plain decoding; {inside:.2f} in graphs alone, {repeated:.2f} if passes took what "
        "they take repeated"
    )
    name = f"passes-within-decoding-{options.model.replace('/', '-')}"
    result = {"speedup": gain, "in_graphs": inside, "repeated": repeated, "rows": rows}
    about = {
        "script": "benchmarks/passes_within_decoding.py",
        "draft": options.draft,
        "requests": options.requests,
    }
    print(save(name, about | result))


def measured(
    session: Session, request: dict[str, Any], longest: int, last: dict[str, Timed]
) -> tuple[Stats, list[tuple[str, float]], list[float]]:
    """Counters of a request, every run of a graph in it, and its last pass of the layers, repeated."""
    Timed.into = noted = []
    stats = session.generate(**request, max_new_tokens=longest).stats
    Timed.into = None
    layers = last["segment.0"]
    repeated = []
    for _ in range(REPEATS):
        begin = perf_counter()
        layers.run()
        repeated.append(perf_counter() - begin)
    return stats, noted, repeated


class Way:
    """Requests that were decoded in one way."""

    def __init__(self) -> None:
        self.stats: list[Stats] = []
        self.runs: dict[str, list[float]] = defaultdict(list)
        self.repeated: list[float] = []

    def add(self, stats: Stats, noted: list[tuple[str, float]], repeated: list[float]) -> None:
        self.stats.append(stats)
        for graph, seconds in noted:
            self.runs[graph].append(seconds)
        self.repeated += repeated

    def row(self) -> dict[str, Any]:
        """Milliseconds a cycle, whole and in graphs, of prefill apart; medians of a pass of the layers."""
        total = Stats.total(self.stats)
        return {
            "tau": total.tau,
            "cycle_ms": 1e3 * (total.decode_seconds or 0.0) / total.cycles,
            "graphs_ms": 1e3 * (total.engine_seconds or 0.0) / total.cycles,
            "layers_within_ms": 1e3 * statistics.median(self.runs["segment.0"]),
            "layers_repeated_ms": 1e3 * statistics.median(self.repeated),
            "graphs": {name: 1e3 * statistics.median(runs) for name, runs in self.runs.items()},
        }


def gain_repeated(plain: dict[str, Any], drafted: dict[str, Any]) -> float:
    """The speed-up in graphs alone, with a pass of the layers as long as when it is repeated."""
    seconds = [
        row["graphs_ms"] - row["layers_within_ms"] + row["layers_repeated_ms"] for row in (plain, drafted)
    ]
    return drafted["tau"] * seconds[0] / seconds[1]


if __name__ == "__main__":
    main()
