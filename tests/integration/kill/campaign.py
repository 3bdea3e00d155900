"""Commands that write are killed (SIGKILL) before each system call that touches their output, and run again.

    make kill POINTS=200
    python -m tests.integration.kill.campaign --points 200 [--command build --command compile] [--save FILE.json]
    python -m tests.integration.kill.campaign --command compile --points 200 --first 100 --count 100 --save part-2.json
    python -m tests.integration.kill.campaign --merge part-1.json part-2.json --save FILE.json
    python -m tests.integration.kill.campaign --command compile --point 42           # one case again

The points of a command are counted first; where it has more than `--points`, they are spread evenly over all of them. What
counts as a failure is in killing.py: what was there before is neither the old one nor the new one, the command that is run
again fails, or leaves something else than a run that was never killed, or leaves more files. Each command is run to its end
and once more, too. The exit status is 1 if anything failed. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # threads would not survive a fork
os.environ.update(TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", HF_HUB_OFFLINE="1")

from tests.integration.kill.killing import EQUAL, FAILED, FINISHED, REFUSED, judge, prepared, spread  # noqa: E402
from tests.integration.kill.scenes import SCENES  # noqa: E402

OUTCOMES = (EQUAL, REFUSED, FINISHED, FAILED)


def imported() -> None:
    """Everything that a command imports, in this process; ONNX Runtime's pool gets no thread, which a fork would not have."""
    import torch
    import tqdm
    from vlmexport.calibration import cli  # noqa: F401
    from vlmexport.calibration.training import run  # noqa: F401
    from vlmexport.exporter.pipeline import (
        build_bundle,  # noqa: F401
        export_draft,  # noqa: F401
    )
    from vlmexport.exporter.tensorrt import compile  # noqa: F401
    from vlmexport.runtime.cli import build_app
    from vlmexport.runtime.engines.onnxruntime import use_global_pool

    from tests.support import kept_traces

    for command in (
        "build",
        "train",
        "compile",
        "tune",
        "generate-data",
        "quantize",
        "export-draft",
        "caption",
    ):
        build_app(command)
    kept_traces.install()
    torch.set_num_threads(1)
    use_global_pool(1)
    tqdm.tqdm.monitor_interval = 0  # a thread of its own


def row_of(name: str, base: Path, most: int, first: int, count: int | None) -> dict[str, Any]:
    """Kills one command at its points from `first` on, `count` of them."""
    begin = time.monotonic()
    stage = prepared(name, base)
    chosen = spread(len(stage.points), most)
    part = chosen[first : None if count is None else first + count]
    row: dict[str, Any] = {
        "calls": len(stage.points), "points": len(chosen), "ranges": [[first, first + len(part)]],
        "kinds": dict(Counter(stage.points[number][0] for number in part)),
        **dict.fromkeys(OUTCOMES, 0), "failures": [],
    }  # fmt: skip
    for number in part:
        verdict = judge(stage, number)
        row[verdict.outcome] += 1
        if verdict.outcome == FAILED:
            call, path = stage.points[number]
            where = f"{call} {Path(path).relative_to(stage.world)}"
            row["failures"].append({"point": number, "before": where, "problem": verdict.problem})
            print(f"FAILED {name}, point {number}, before {where}: {verdict.problem}", flush=True)
    if first == 0:
        verdict = judge(stage, len(stage.points))
        row["again"] = verdict.outcome
        if verdict.outcome == FAILED:
            row[FAILED] += 1
            row["failures"].append(
                {"point": len(stage.points), "before": "its end", "problem": verdict.problem}
            )
            print(f"FAILED {name}, run to its end and again: {verdict.problem}", flush=True)
    row["seconds"] = round(time.monotonic() - begin, 1)
    shutil.rmtree(stage.folder, ignore_errors=True)
    return row


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Saved campaigns as one. Raises ValueError where two hold a point of a command twice, or chose other points."""
    rows: dict[str, Any] = {}
    for part in parts:
        for name, row in part["commands"].items():
            if name not in rows:
                rows[name] = {**row, "ranges": list(row["ranges"]), "failures": list(row["failures"])}
                continue
            own = rows[name]
            if (own["calls"], own["points"]) != (row["calls"], row["points"]):
                raise ValueError(f"{name}: the files chose among other points")
            ranges = sorted([*own["ranges"], *row["ranges"]])
            if any(before[1] > after[0] for before, after in itertools.pairwise(ranges)):
                raise ValueError(f"{name}: a point is in two files")
            own["ranges"] = ranges
            if "again" in row:
                own["again"] = row["again"]
            own["failures"] += row["failures"]
            own["kinds"] = dict(Counter(own["kinds"]) + Counter(row["kinds"]))
            for field in (*OUTCOMES, "seconds"):
                own[field] += row[field]
    return {"machine": parts[0]["machine"], "commands": rows}


def machine() -> dict[str, Any]:
    """Where it ran."""
    return {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()}


def table(found: dict[str, Any]) -> str:
    """For people, in Markdown."""
    lines = [
        "| command | calls that write | killed at | run again: equal | refused, remedy works | finished before | failed | run twice |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, row in found["commands"].items():
        done = sum(last - first for first, last in row["ranges"])
        lines.append(
            f"| {name} | {row['calls']:,} | {done:,} | "
            + " | ".join(f"{row[outcome]:,}" for outcome in OUTCOMES)
            + f" | {row.get('again', '')} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--command", action="append", choices=list(SCENES))
    parser.add_argument("--points", type=int, default=200, help="kill each command at most so often")
    parser.add_argument(
        "--first", type=int, default=0, help="begin with this point of those that were chosen"
    )
    parser.add_argument("--count", type=int, help="end after so many points of each command")
    parser.add_argument("--point", type=int, help="one case: the number of the call")
    parser.add_argument("--folder", type=Path, help="for the worlds; default: a temporary one")
    parser.add_argument("--save", type=Path, help="what was found, as JSON")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="one table of saved files")
    arguments = parser.parse_args()
    if arguments.merge:
        try:
            found = merged([json.loads(path.read_text("utf-8")) for path in arguments.merge])
        except ValueError as error:
            parser.error(str(error))
        return _finish(found, arguments.save)
    base = arguments.folder or Path(tempfile.mkdtemp(prefix="vlmexport-kill-"))
    names = arguments.command or list(SCENES)
    imported()
    if arguments.point is not None:
        stage = prepared(names[0], base)
        verdict = judge(stage, arguments.point)
        print(
            f"{names[0]}, before {stage.points[arguments.point]}: {verdict.outcome} {verdict.problem}; in {stage.folder}"
        )
        return 1 if verdict.outcome == FAILED else 0
    rows = {name: row_of(name, base, arguments.points, arguments.first, arguments.count) for name in names}
    if arguments.folder is None:
        shutil.rmtree(base, ignore_errors=True)
    return _finish({"machine": machine(), "commands": rows}, arguments.save)


def _finish(found: dict[str, Any], save: Path | None) -> int:
    print(table(found))
    if save is not None:
        save.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 1 if any(row[FAILED] for row in found["commands"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
