"""Hostile inputs for some minutes: bundles, pictures, checkpoints, drafts and data that are damaged or mean harm.

    make fuzz MINUTES=10 SEED=1
    make fuzz COUNT=2500 FIRST=5000 SEED=1 SAVE=part-3.json          # 10,000 in four calls; then
    python -m tests.integration.fuzz.campaign --merge part-1.json part-2.json part-3.json part-4.json
    python -m tests.integration.fuzz.campaign --minutes 10 --seed 1 [--kind image --kind draft] [--save FILE.json]
    python -m tests.integration.fuzz.campaign --case image:1:42          # one case again: kind, seed, number

A case is a function of (kind, seed, number); the kinds take turns, so that a case also has a place in the whole series,
from which `--first` and `--count` choose. Ctrl-C and SIGTERM end a campaign after the case that runs, with its table
and its file, which says where to go on (`next`). Each case runs in a process of its own; what counts as a failure is in
cases.py: an end by a signal, a hang, a traceback, more than 2 GB, a refusal in more than one line, another answer from
a bundle whose damage a checksum covers. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # threads would not survive a fork
os.environ.update(TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")  # neither would theirs
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.integration.fuzz.cases import Case, Verdict, judge  # noqa: E402
from tests.integration.fuzz.kinds import KINDS  # noqa: E402


def imported() -> None:
    """Everything that a case may import, so that its process need not."""
    import tqdm
    from vlmexport.calibration.data import load_records  # noqa: F401
    from vlmexport.exporter.cli import app  # noqa: F401
    from vlmexport.exporter.pipeline import build_bundle  # noqa: F401
    from vlmexport.runtime import Session  # noqa: F401
    from vlmexport.runtime.cli import build_app

    for command in ("run", "build", "eval", "tune", "inspect"):
        build_app(command)
    tqdm.tqdm.monitor_interval = 0  # a thread of its own


def one(
    seeds: Any, kind: str, seed: int, number: int, base: Path, patience: float = 1.0
) -> tuple[Verdict, Path]:
    """Make and judge one case; returns the folder of what it read, which is the caller's to remove."""
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{seed}-{number}-", dir=base))
    made: Case = seeds.make(random.Random(f"{kind}:{seed}:{number}"), folder)
    return judge(replace(made, limit=made.limit * patience), folder), folder


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
    parser.add_argument("--first", type=int, default=0, help="begin with this case of the series")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=1.0, help="on a slow machine: how many times longer a case may take"
    )
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    parser.add_argument("--case", metavar="KIND:SEED:NUMBER")
    parser.add_argument(
        "--folder", type=Path, help="where whole bundles and checkpoints are kept for the next time"
    )
    parser.add_argument("--save", type=Path, help="what was found, as JSON")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="one table of saved files")
    arguments = parser.parse_args()
    if arguments.merge:
        try:
            found = merged([json.loads(path.read_text("utf-8")) for path in arguments.merge])
        except ValueError as error:
            parser.error(str(error))
        return _finish(found, arguments.save)
    base = arguments.folder or Path(tempfile.mkdtemp(prefix="vlmexport-fuzz-"))
    wanted = [arguments.case.split(":")[0]] if arguments.case else arguments.kind or list(KINDS)
    imported()
    seeds = {}
    for kind in wanted:
        (base / "seeds" / kind).mkdir(parents=True, exist_ok=True)
        seeds[kind] = KINDS[kind](base / "seeds" / kind)
    if arguments.case:
        kind, seed, number = arguments.case.split(":")
        verdict, folder = one(seeds[kind], kind, int(seed), int(number), base, arguments.patience)
        print(
            f"{arguments.case}: {verdict.problem or 'well'} after {verdict.seconds:.1f} s; in {folder}\n{verdict.errors}"
        )
        return 1 if verdict.problem else 0
    found = _run(arguments, seeds, wanted, base)
    if arguments.folder is None:
        shutil.rmtree(base, ignore_errors=True)
    return _finish(found, arguments.save)


def _run(
    arguments: argparse.Namespace, seeds: dict[str, Any], wanted: list[str], base: Path
) -> dict[str, Any]:
    stopped: list[int] = []
    before = {n: signal.signal(n, lambda n, _: stopped.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
    first = arguments.first
    found: dict[str, Any] = {
        "seed": arguments.seed, "order": wanted, "ranges": [[first, first]],
        "kinds": {kind: new_row() for kind in wanted}, "failures": [],
    }  # fmt: skip
    end = None if arguments.count is not None else time.monotonic() + 60 * arguments.minutes
    stop = None if arguments.count is None else first + arguments.count
    for place, (kind, number) in enumerate(islice(numbered(wanted), first, stop), first):
        if stopped or (end is not None and time.monotonic() > end):
            break
        begin = time.monotonic()
        verdict, folder = one(seeds[kind], kind, arguments.seed, number, base, arguments.patience)
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)
        shutil.rmtree(folder)
        row = found["kinds"][kind]
        row["failed" if verdict.problem else "refused" if verdict.status else "served"] += 1
        row["seconds"] += time.monotonic() - begin
        row["slowest_seconds"] = max(row["slowest_seconds"], verdict.seconds)
        row["most_bytes"] = max(row["most_bytes"], verdict.peak)
        found["ranges"] = [[first, place + 1]]
        if verdict.problem:
            case = f"{kind}:{arguments.seed}:{number}"
            found["failures"].append(
                {"case": case, "problem": verdict.problem, "errors": verdict.errors[-3000:]}
            )
            print(f"FAILED {case}: {verdict.problem}\n    {verdict.errors.strip()[-400:]}", flush=True)
    for n, handler in before.items():
        signal.signal(n, handler)
    found["next"] = found["ranges"][0][1]
    return found


def new_row() -> dict[str, Any]:
    """What is counted of a kind. `seconds` are those of all its cases, `slowest_seconds` of one, in its process."""
    return {"refused": 0, "served": 0, "failed": 0, "seconds": 0.0, "slowest_seconds": 0.0, "most_bytes": 0}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Saved campaigns as one. Raises ValueError unless they have one seed and share no case.

    A number belongs to a case of an order of kinds: ranges are told by order, and orders may not share a kind.
    """
    seed, ranges = parts[0]["seed"], {}
    for part in parts:
        if part["seed"] != seed:
            raise ValueError("the files are of other seeds: their cases are others")
        for order, found in _by_order(part).items():
            ranges.setdefault(order, []).extend(found)
    for order, others in itertools.combinations(ranges, 2):
        if shared := set(order.split()) & set(others.split()):
            raise ValueError(
                f"{shared.pop()} is of other kinds' company in another file: its cases have other numbers"
            )
    for order, found in ranges.items():
        ranges[order] = _joined(found)
    rows: dict[str, Any] = {}
    for part in parts:
        for kind, row in part["kinds"].items():
            own = rows.setdefault(kind, new_row())
            for name, value in row.items():
                combine = max if name in ("slowest_seconds", "most_bytes") else sum
                own[name] = combine((own[name], value))
    failures = [failure for part in parts for failure in part["failures"]]
    whole: dict[str, Any] = {"seed": seed, "kinds": rows, "failures": failures}
    if len(ranges) > 1:
        return whole | {"orders": ranges}
    ((order, found),) = ranges.items()
    return whole | {"order": order.split(), "ranges": found, "next": found[-1][1]}


def _by_order(part: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Ranges of a saved campaign by its order of kinds."""
    return part["orders"] if "orders" in part else {" ".join(part["order"]): part["ranges"]}


def _joined(ranges: list[list[int]]) -> list[list[int]]:
    """In order, those that touch made one. Raises ValueError where two share a case."""
    found: list[list[int]] = []
    for first, last in sorted(ranges):
        if found and first < found[-1][1]:
            raise ValueError(f"the cases from {first} are in two files")
        if found and first == found[-1][1]:
            found[-1][1] = last
        else:
            found.append([first, last])
    return found


def _finish(found: dict[str, Any], save: Path | None) -> int:
    """Print the table and save what was found; returns the exit status."""
    total = {**new_row(), "slowest_seconds": max(row["slowest_seconds"] for row in found["kinds"].values())}
    total["most_bytes"] = max(row["most_bytes"] for row in found["kinds"].values())
    for row in found["kinds"].values():
        for name in ("refused", "served", "failed", "seconds"):
            total[name] += row[name]
    print(
        f"{'kind':<14} {'cases':>7} {'refused':>8} {'served':>7} {'failed':>7} {'slowest':>9} {'most memory':>12} "
        f"{'a minute':>9}"
    )
    for kind, row in (*found["kinds"].items(), ("all", total)):
        cases = row["refused"] + row["served"] + row["failed"]
        rate = 60 * cases / row["seconds"] if row["seconds"] else 0.0
        print(
            f"{kind:<14} {cases:>7,} {row['refused']:>8,} {row['served']:>7,} {row['failed']:>7,} "
            f"{row['slowest_seconds']:>7.1f} s {row['most_bytes'] / 1e6:>9,.0f} MB {rate:>9,.0f}"
        )
    for order, ranges in _by_order(found).items():
        told = ", ".join(f"{first} to {last - 1}" for first, last in ranges if last > first) or "none"
        of = f" of {', '.join(order.split())}" if "orders" in found else ""
        print(f"Seed {found['seed']}, cases {told}{of}; go on with --first {ranges[-1][1]}")
    if save:
        save.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
