"""What pages of 2 MB gain where tensors are made anew: a layer's matrix from float16 to float32 to float64.

    python -m benchmarks.large_pages [--rounds N]

Two processes, one with PyTorch's THP_MEM_ALLOC_ENABLE as `vlmexport build` sets it and one without, in turn. Seconds are
of one conversion, and of them the kernel's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.machine import save
from tests.support.programs import program

SHAPE = (2048, 11008)
REPEATS = 20


def convert() -> None:
    """Worker: [seconds, seconds of the kernel] of one conversion."""
    import torch
    from vlmexport.exporter.common.memory import return_large_buffers

    return_large_buffers()
    torch.set_num_threads(1)
    source = torch.ones(SHAPE, dtype=torch.float16)
    source.float().double()
    begin, before = time.perf_counter(), os.times()
    for _ in range(REPEATS):
        source.float().double()
    after = os.times()
    print(json.dumps([(time.perf_counter() - begin) / REPEATS, (after.system - before.system) / REPEATS]))


def main() -> None:
    if sys.argv[1:] == ["--convert"]:
        convert()
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    by_pages: dict[str, list[list[float]]] = {"usual": [], "large": []}
    for _ in range(rounds):
        for pages, rows in by_pages.items():
            settings = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1" if pages == "large" else "0"}
            done = subprocess.run(
                program("benchmarks.large_pages", "--convert"),
                env=settings,
                capture_output=True,
                text=True,
                check=True,
            )
            rows.append(json.loads(done.stdout))
    row = {
        pages: {
            "seconds": round(statistics.median(r[0] for r in rows), 4),
            "kernel_seconds": round(statistics.median(r[1] for r in rows), 4),
        }
        for pages, rows in by_pages.items()
    }
    ratio = [usual[0] / large[0] for usual, large in zip(by_pages["usual"], by_pages["large"], strict=True)]
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    result = {
        "script": "benchmarks/large_pages.py", "kernel_setting": setting, "bytes": 14 * SHAPE[0] * SHAPE[1], **row,
        "faster_by": {"median": round(statistics.median(ratio), 2), "lowest": round(min(ratio), 2), "highest": round(max(ratio), 2)},
    }  # fmt: skip
    print(json.dumps(result))
    print(save("large-pages", result, "torch"))


if __name__ == "__main__":
    main()
