"""benchmarks/gpu_kernels.py: what it makes of traces."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu_kernels as kernels


def trace(*events: tuple[str, str, float]) -> dict[str, Any]:
    return {"traceEvents": [{"cat": cat, "name": name, "dur": dur} for cat, name, dur in events]}


def test_only_the_work_of_the_gpu_counts() -> None:
    seen = kernels.Kernels.of(
        trace(("kernel", "gemv", 3.0), ("kernel", "gemv", 4.0), ("cuda_runtime", "launch", 9.0))
        | {"schemaVersion": 1}
    )
    assert seen.launches == {"gemv": 2}
    assert seen.seconds["gemv"] == pytest.approx(7e-6)


def test_a_token_costs_what_the_longer_request_has_beyond_the_shorter() -> None:
    short = kernels.Kernels.of(trace(("kernel", "vision", 50.0), ("kernel", "gemv", 10.0)))
    long = kernels.Kernels.of(
        trace(
            ("kernel", "vision", 50.0),
            *[("kernel", "gemv", 10.0)] * 5,
            *[("gpu_memcpy", "copy", 1.0)] * 4,
        )
    )
    rows = long.without(short, 4)
    assert [row["kernel"] for row in rows] == ["gemv", "copy", "vision"]
    assert [row["us"] for row in rows] == pytest.approx([10.0, 1.0, 0.0])
    assert [row["launches"] for row in rows] == [1.0, 1.0, 0.0]


def test_the_table_says_what_no_kernel_explains() -> None:
    found = {
        "model": "a-model",
        "precision": "float16",
        "wall_us": 100.0,
        "busy_us": 60.0,
        "launches": 12.0,
        "bandwidth_floor_us": None,
        "kernels": [{"kernel": "gemv", "us": 60.0, "launches": 12.0}],
    }
    assert kernels.table(found).splitlines() == [
        "a-model, float16: 100 us a token, kernels 60 us in 12 launches",
        "     60.0 us    12.0 x  gemv",
    ]
