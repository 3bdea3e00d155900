"""Hostile inputs for some minutes: bundles, pictures, checkpoints, drafts and data that are damaged or mean harm.

    make fuzz MINUTES=10 SEED=1
    python tests/fuzz/campaign.py --minutes 10 --seed 1 [--kind image --kind draft] [--count 10000] [--save FILE.json]
    python tests/fuzz/campaign.py --case image:1:42          # one case again: kind, seed, number

A case is a function of (kind, seed, number). Each runs in a process of its own; what counts as a failure is in
cases.py: an end by a signal, a hang, a traceback, more than 2 GB, a refusal in more than one line, another answer from
a bundle whose damage a checksum covers. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # threads would not survive a fork
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cases import Case, Verdict, judge  # noqa: E402
from kinds import KINDS  # noqa: E402


def imported() -> None:
    """Everything that a case may import, so that its process need not."""
    from vlmexport.calibration.data import load_records  # noqa: F401
    from vlmexport.exporter.build import build_bundle  # noqa: F401
    from vlmexport.exporter.cli import app  # noqa: F401
    from vlmexport.runtime import Session  # noqa: F401
    from vlmexport.runtime.cli import build_app

    for command in ("run", "build", "eval"):
        build_app(command)


def one(seeds: Any, kind: str, seed: int, number: int, base: Path) -> tuple[Verdict, Path]:
    """Make and judge one case; returns the folder of what it read, which is the caller's to remove."""
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{seed}-{number}-", dir=base))
    made: Case = seeds.make(random.Random(f"{kind}:{seed}:{number}"), folder)
    return judge(made, folder), folder


def numbered(kinds: list[str]) -> Iterator[tuple[str, int]]:
    """Cases of all kinds in turn."""
    for number in count():
        for kind in kinds:
            yield kind, number


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--count", type=int, help="end after so many cases, whatever the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    parser.add_argument("--case", metavar="KIND:SEED:NUMBER")
    parser.add_argument(
        "--folder", type=Path, help="where whole bundles and checkpoints are kept for the next time"
    )
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    base = arguments.folder or Path(tempfile.mkdtemp(prefix="vlmexport-fuzz-"))
    wanted = [arguments.case.split(":")[0]] if arguments.case else arguments.kind or list(KINDS)
    imported()
    seeds = {}
    for kind in wanted:
        (base / "seeds" / kind).mkdir(parents=True, exist_ok=True)
        seeds[kind] = KINDS[kind](base / "seeds" / kind)
    if arguments.case:
        kind, seed, number = arguments.case.split(":")
        verdict, folder = one(seeds[kind], kind, int(seed), int(number), base)
        print(
            f"{arguments.case}: {verdict.problem or 'well'} after {verdict.seconds:.1f} s; in {folder}\n{verdict.errors}"
        )
        return 1 if verdict.problem else 0
    found = _run(arguments, seeds, wanted, base)
    if arguments.folder is None:
        shutil.rmtree(base, ignore_errors=True)
    if arguments.save:
        arguments.save.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["failures"] else 0


def _run(
    arguments: argparse.Namespace, seeds: dict[str, Any], wanted: list[str], base: Path
) -> dict[str, Any]:
    end = time.monotonic() + 60 * arguments.minutes
    tallies: dict[str, Counter[str]] = {kind: Counter() for kind in wanted}
    slowest, largest = dict.fromkeys(wanted, 0.0), dict.fromkeys(wanted, 0)
    failures: list[dict[str, Any]] = []
    for done, (kind, number) in enumerate(numbered(wanted)):
        if done == arguments.count or (arguments.count is None and time.monotonic() > end):
            break
        verdict, folder = one(seeds[kind], kind, arguments.seed, number, base)
        tallies[kind]["failed" if verdict.problem else "refused" if verdict.status else "served"] += 1
        slowest[kind], largest[kind] = max(slowest[kind], verdict.seconds), max(largest[kind], verdict.peak)
        if verdict.problem:
            case = f"{kind}:{arguments.seed}:{number}"
            failures.append({"case": case, "problem": verdict.problem, "errors": verdict.errors[-3000:]})
            print(f"FAILED {case}: {verdict.problem}\n    {verdict.errors.strip()[-400:]}", flush=True)
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)
        shutil.rmtree(folder)
    print(
        f"{'kind':<14} {'cases':>7} {'refused':>8} {'served':>7} {'failed':>7} {'slowest':>9} {'most memory':>12}"
    )
    for kind in wanted:
        tally = tallies[kind]
        print(
            f"{kind:<14} {tally.total():>7,} {tally['refused']:>8,} {tally['served']:>7,} {tally['failed']:>7,} "
            f"{slowest[kind]:>7.1f} s {largest[kind] / 1e6:>9,.0f} MB"
        )
    rows = {
        kind: {**tallies[kind], "slowest_seconds": round(slowest[kind], 2), "most_bytes": largest[kind]}
        for kind in wanted
    }
    return {"seed": arguments.seed, "kinds": rows, "failures": failures}


if __name__ == "__main__":
    sys.exit(main())
