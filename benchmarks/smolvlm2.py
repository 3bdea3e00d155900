"""SmolVLM2 on a CPU: float32, int8 and int4 at its real sizes, with tiles and with one tile a picture.

    python -m benchmarks.smolvlm2 --folder DIR [--size 256m …] [--rounds 5]

The weights are random, in the shapes of the published checkpoints (`benchmarks/published_shapes.py`); times do not depend
on their values. Every arm is a bundle and a process of its own. Each round asks all arms in random order for the same
picture of 640 × 480 pixels, a short question and 32 tokens, without a draft and without EOS, and each picture is new, so that
none is remembered. Ratios are medians of pairs within a round. Needs 16 GB of disk and of memory for the 2.2B.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import save, stored
from benchmarks.published_shapes import MODELS
from benchmarks.real_size import make
from benchmarks.workers import Worker
from tests.support.programs import program

THREADS, NEW_TOKENS = 2, 32
WEIGHTS = ("float", "int8", "int4")
SIZES = ("256m", "500m", "2.2b")
SIDE, LENGTH = (480, 640, 3), 2048
"""Of the picture, and the most tokens of a request."""
PHASES = ("vision", "prefill")
METRICS = ("vision", "prefill", "first_token", "per_token")


def serve(path: str) -> None:
    """Worker: reads the seed of a picture a line, answers tokens, their number in the prompt, and seconds by metric."""
    import numpy as np
    import psutil
    from vlmexport.runtime import Session

    session = Session.load(path, threads=THREADS, max_length=LENGTH)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        picture = np.random.default_rng(json.loads(line)).integers(0, 256, SIDE, np.uint8)
        result = session.generate(
            picture, "What is in front?", max_new_tokens=NEW_TOKENS, speculative=False, ignore_eos=True
        )
        stats = result.stats
        speed = stats.tokens_per_second
        assert speed is not None, "an answer of one token has no speed"
        seconds = {phase: getattr(stats.seconds, phase) for phase in PHASES}
        seconds |= {"first_token": stats.time_to_first_token, "per_token": 1 / speed}
        print(
            json.dumps(
                [list(result.tokens), stats.prompt_tokens, seconds, psutil.Process().memory_info().rss]
            ),
            flush=True,
        )


def build_one(model: str, bundle: str, weights: str, pixels: str) -> None:
    """Worker: one bundle, not compared with PyTorch, which the tests do for small models."""
    from vlmexport.exporter.pipeline import BuildRequest, build_bundle

    build_bundle(
        BuildRequest(
            model=model, output=Path(bundle), weights=weights, max_pixels=int(pixels) or None, drafts=["prompt-lookup"],
            max_length=LENGTH, parity=False,
        )
    )  # fmt: skip


def build(size: str, folder: Path) -> dict[str, Path]:
    """The bundles of a size by arm: kinds of weights, with tiles and with one tile."""
    name = f"smolvlm2-{size}"
    model = folder / name
    if not model.exists():
        make(MODELS[name], model)
    side = MODELS[name]["vision"]["image_size"]
    bundles = {}
    for weights, tiles in product(WEIGHTS, ("one tile", "tiles")):
        if size == "2.2b" and (weights, tiles) in {("float", "tiles"), ("int8", "tiles")}:
            continue  # all of them at once would not fit the memory
        bundle = folder / f"{name}-{weights}-{tiles.replace(' ', '-')}"
        if not bundle.exists():
            pixels = side * side if tiles == "one tile" else 0
            line = program("benchmarks.smolvlm2", "--build", model, bundle, weights, pixels)
            subprocess.run(line, check=True)
        bundles[f"{weights}, {tiles}"] = bundle
    return bundles


def measure(bundles: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Times of all arms, asked in turn."""
    workers = {arm: Worker(program("benchmarks.smolvlm2", "--serve", path)) for arm, path in bundles.items()}
    order, shuffle = list(workers), random.Random(0)
    times: dict[str, dict[str, list[float]]] = {arm: {metric: [] for metric in METRICS} for arm in workers}
    prompts, memory = {}, {}
    for number in range(rounds + 1):
        shuffle.shuffle(order)
        for arm in order:
            _, prompts[arm], seconds, memory[arm] = workers[arm].ask(number)
            if number:  # the first round warms up
                for metric in METRICS:
                    times[arm][metric].append(seconds[metric])
    for worker in workers.values():
        worker.close()
    return {
        arm: {
            "bundle_mb": round(sum(file.stat().st_size for file in bundles[arm].iterdir()) / 1e6, 1),
            "resident_mb": round(memory[arm] / 1e6),
            "prompt_tokens": prompts[arm],
            "ms": {metric: round(1e3 * statistics.median(values), 2) for metric, values in own.items()},
            "times_as_fast_as_float": {
                metric: round(statistics.median(b / a for a, b in zip(values, base[metric], strict=True)), 2)
                for base in [times.get(f"float, {arm.partition(', ')[2]}")]
                if base
                for metric, values in own.items()
            },
        }
        for arm, own in times.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    if sys.argv[1:2] == ["--build"]:
        build_one(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where models and bundles go for a while")
    parser.add_argument("--size", action="append", choices=SIZES, help="repeatable; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--build-only", action="store_true", help="build, and measure another time")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = stored("smolvlm2", "sizes")
    for size in options.size or SIZES:
        bundles = build(size, options.folder)
        if options.build_only:
            continue
        rows[size] = measure(bundles, options.rounds)
        print(size, json.dumps(rows[size], indent=1), flush=True)
        for path in (*bundles.values(), options.folder / f"smolvlm2-{size}"):
            shutil.rmtree(path)
    if not options.build_only:
        result = {
            "script": "benchmarks/smolvlm2.py", "threads": THREADS, "new_tokens": NEW_TOKENS, "rounds": options.rounds,
            "picture": "640 x 480", "sizes": rows,
        }  # fmt: skip
        print(save("smolvlm2", result, "onnxruntime"))


if __name__ == "__main__":
    main()
