"""Where the time of a decoded token goes on a GPU: its kernels, by CUPTI, which PyTorch's profiler reads for the whole process.

    python -m benchmarks.gpu_kernels BUNDLE [--tokens 32] [--output FILE]

Plain decoding on the CUDA provider, batch 1, greedy. A request of one token and one of 1 + --tokens are traced; the difference is
what decoding costs. `wall` is timed without tracing. What `wall` has beyond `busy` is a GPU that waits for the host, or between
two kernels. Needs PyTorch for CUDA beside onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from vlmexport.runtime import Session
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.measure.fit import roofline

from benchmarks.gpu import SIDES, gpu_facts, published_bandwidth
from benchmarks.machine import write

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events in which the GPU works."""

SHOWN = 25
REPEATS = 5


@dataclass(frozen=True)
class Kernels:
    """Seconds and launches by kernel."""

    seconds: Mapping[str, float]
    launches: Mapping[str, int]

    @classmethod
    def of(cls, trace: Mapping[str, Any]) -> Kernels:
        """Of a trace in Chrome's format, durations in microseconds."""
        seconds: Counter[str] = Counter()
        launches: Counter[str] = Counter()
        for event in trace["traceEvents"]:
            if event.get("cat") in WORK:
                seconds[event["name"]] += event["dur"] / 1e6  # type: ignore[assignment]
                launches[event["name"]] += 1
        return cls(seconds, launches)

    def without(self, other: Kernels, count: int) -> list[dict[str, Any]]:
        """A `count`-th of what is here beyond `other`, longest first."""
        rows = [
            {
                "kernel": name,
                "us": 1e6 * (time - other.seconds.get(name, 0.0)) / count,
                "launches": (self.launches[name] - other.launches.get(name, 0)) / count,
            }
            for name, time in self.seconds.items()
        ]
        return sorted(rows, key=lambda row: -row["us"])


def traced(work: Callable[[], object]) -> Kernels:
    """What the GPU does in `work`."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return Kernels.of(json.loads(path.read_text("utf-8")))


def measure(bundle: Path, tokens: int, bandwidth: float | None) -> dict[str, Any]:
    """Kernels of a plain token, and its time without tracing; `bandwidth` in bytes per second."""
    with Session.load(bundle, device="cuda") as session:
        manifest = session.bundle.manifest
        picture = None if manifest.image is None else synthetic_image(*SIDES)
        prompt = None if picture is not None else "a"

        def decode(count: int) -> float:
            begin = time.perf_counter()
            session.generate(picture, prompt, max_new_tokens=count, draft="none", ignore_eos=True)
            return time.perf_counter() - begin

        for count in (1, 1 + tokens, 1):  # captures
            decode(count)
        wall = statistics.median(decode(1 + tokens) - decode(1) for _ in range(REPEATS)) / tokens
        short = traced(lambda: decode(1))
        long = traced(lambda: decode(1 + tokens))
        floor = None if bandwidth is None else roofline(manifest, bandwidth, manifest.limits.max_length // 2)
    rows = long.without(short, tokens)
    return {
        "model": manifest.model.source,
        "precision": manifest.compute_dtype,
        "max_length": manifest.limits.max_length,
        "tokens": tokens,
        "wall_us": 1e6 * wall,
        "busy_us": sum(row["us"] for row in rows),
        "launches": sum(row["launches"] for row in rows),
        "bandwidth_floor_us": None if floor is None else 1e6 * floor.token_seconds(),
        "kernels": rows,
    }


def table(report: Mapping[str, Any]) -> str:
    """The longest kernels, for people."""
    floor = report["bandwidth_floor_us"]
    lines = [
        f"{report['model']}, {report['precision']}: {report['wall_us']:.0f} us a token, kernels {report['busy_us']:.0f} us in "
        f"{report['launches']:.0f} launches" + ("" if floor is None else f", bandwidth {floor:.0f} us")
    ]
    for row in report["kernels"][:SHOWN]:
        lines.append(f"{row['us']:9.1f} us {row['launches']:7.1f} x  {row['kernel'][:140]}")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, metavar="FILE")
    asked = parser.parse_args()
    facts = gpu_facts()
    report = measure(asked.bundle, asked.tokens, published_bandwidth(facts["gpu"]))
    print(table(report))
    if asked.output is not None:
        result = {"script": "benchmarks/gpu_kernels.py", **facts, **report}
        write(asked.output, result, "onnxruntime-gpu", "torch")


if __name__ == "__main__":
    main()
