"""Medusa heads for a ViT-GPT2 captioner: 2 and 4 heads, the target frozen (Medusa-1) or learning with them (Medusa-2).

    python -m benchmarks.papers_medusa_captioning --folder runs/captioning --kinds medusa-1 medusa-2 --sweep
    python -m benchmarks.papers_medusa_captioning --folder runs/captioning --kinds medusa-1 medusa-2
    python -m benchmarks.papers_medusa_captioning --folder runs/captioning --kinds medusa-1 medusa-2 --time

The first command trains four heads of one seed at several learning rates and measures them on validation scenes; from its
results/papers-medusa-captioning-rates.json those of `captioning_runs.KINDS` were chosen. The second one trains heads for
tiny-vit-gpt2 on its own captions, three seeds of each, and counts tokens on held-out scenes: tau, which ranks of which head
are right, differences from plain decoding, and what the captions of a changed target are worth. What is in the folder is
kept, so the same command continues a killed one. It writes results/papers-medusa-captioning.json. The third one times the
bundles that the second one built, those of seed 0, and writes results/papers-medusa-captioning-times.json; it wants an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.runtime.common.errors import DivergedError

from benchmarks.captioning_bounds import GPT2, TINY
from benchmarks.captioning_quality import WORTH, of_rates, quality, worth, worth_cells
from benchmarks.captioning_runs import KINDS, SWEPT, TARGET, Run, all_runs, answers, bundle, train
from benchmarks.captioning_times import times
from benchmarks.machine import save

NAME = "papers-medusa-captioning"
HEADS = (2, 4)
PAPER = 2.98
"""Highest speed-up that the paper states. It has no table of speeds, and does not say how drafts are verified."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of answers, trainings and bundles")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--heads", nargs="+", type=int, default=HEADS, metavar="K")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--captions", type=int, default=2048, help="the target's own, to train on")
    parser.add_argument(
        "--validation", type=int, default=128, help="further ones, to choose the best heads by"
    )
    parser.add_argument("--steps", type=int, default=256, help="by default two epochs")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--scenes", type=int, default=160, help="held-out ones")
    parser.add_argument("--threads", type=int, default=1)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--sweep", action="store_true", help="compare rates, in place of seeds")
    timing = parser.add_argument_group("timing")
    instead.add_argument("--time", action="store_true", help="time what was trained, in place of training")
    timing.add_argument("--rounds", type=int, default=5)
    timing.add_argument("--timed-scenes", type=int, default=8, help="decoded one after the other")
    timing.add_argument("--samples", type=int, default=48, help="decoded in batches of 16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print((time_bundles if options.time else sweep if options.sweep else measure)(options))


def sweep(options: argparse.Namespace) -> Path:
    """Trains the most heads at all rates of the kinds, what is not there yet; returns the file of results."""
    told = answers(options.folder, options.captions, options.validation, options.threads)
    rows = []
    for run in [
        Run(k, max(options.heads), 0, rates) for k in options.kinds if k in SWEPT for rates in SWEPT[k]
    ]:
        kept = options.folder / "rates" / f"{run.name}.json"
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(swept(run, options, told)) + "\n")
        rows.append(json.loads(kept.read_text()))
        print("|", " | ".join(map(str, rows[-1].values())), "|", flush=True)
    return save(
        f"{NAME}-rates",
        {"script": f"benchmarks/{NAME.replace('-', '_')}.py --sweep", **settings(options), "rows": rows},
        "torch",
        "transformers",
    )


def swept(run: Run, options: argparse.Namespace, told: list[RecordSet]) -> dict[str, Any]:
    """What a training reaches by its rates; alpha and tau are null where they are too high for a finite loss."""
    try:
        train(run, options.folder, told, options.steps, options.batch_size)
    except DivergedError as error:
        print(error)
        return run.described() | dict.fromkeys(("alpha", "tau", "tokens", "perplexity_over_floor"))
    return of_rates(run, options.folder, options.scenes)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all trainings have in common."""
    return {
        "target": TARGET,
        "captions": options.captions,
        "validation": options.validation,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "scenes": options.scenes,
    }


def measure(options: argparse.Namespace) -> Path:
    """Trains and measures what is not there yet; returns the file of results."""
    told = answers(options.folder, options.captions, options.validation, options.threads)
    runs = []
    for run in all_runs(options.kinds, options.heads, range(options.seeds)):
        kept = options.folder / "quality" / f"{run.name}.json"
        if not kept.exists():
            train(run, options.folder, told, options.steps, options.batch_size)
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(quality(run, options.folder, options.scenes)) + "\n")
        runs.append(json.loads(kept.read_text()))
        print(f"{run.name}: tau {runs[-1]['tau']}", flush=True)
    rows = summary(runs)
    print(table(rows))
    frozen, joint = (KINDS[kind].name for kind in ("medusa-1", "medusa-2"))
    return save(
        NAME,
        {
            "script": f"benchmarks/{NAME.replace('-', '_')}.py",
            **settings(options),
            "rates": {KINDS[kind].name: asdict(KINDS[kind].rates) for kind in options.kinds},
            "paper": paper(options.heads),
            "rows": rows,
            "medusa_1_is_below_medusa_2": {
                str(heads): below(*(taus(runs, kind, heads) for kind in (frozen, joint)))
                for heads in options.heads
            },
            "runs": [{k: v for k, v in run.items() if k != "texts"} for run in runs],
        },
        "torch",
        "transformers",
    )


def time_bundles(options: argparse.Namespace) -> Path:
    """Times the bundles of seed 0; returns the file of results."""
    runs = all_runs(options.kinds, options.heads, [0])
    bundles = {run.name: (bundle(run, options.folder), run.heads) for run in runs}
    speeds = times(bundles, options.timed_scenes, options.samples, options.rounds)
    print("| heads | trained as | decode speed-up | bound | samples/s plain | samples/s with heads | ratio |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        print(timed_row(run, speeds[run.name]))
    return save(
        f"{NAME}-times",
        {
            "script": f"benchmarks/{NAME.replace('-', '_')}.py --time",
            "rounds": options.rounds,
            "scenes": options.timed_scenes,
            "samples": options.samples,
            "bundles": speeds,
        },
        "torch",
    )


def timed_row(run: Run, speed: dict[str, Any]) -> str:
    """A line of Markdown."""
    decode, batch, rate = speed["decode"], speed["samples"], speed["samples_per_second"]
    return (
        f"| {run.heads} | {KINDS[run.kind].name} | {decode['median']:.2f} × [{decode['least']:.2f} – {decode['most']:.2f}] "
        f"| {speed['bound']:.2f} × | {rate['plain']:.1f} | {rate['heads']:.1f} "
        f"| {batch['median']:.2f} × [{batch['least']:.2f} – {batch['most']:.2f}] |"
    )


def paper(heads: Sequence[int]) -> dict[str, Any]:
    """The paper's speed-up beside what arithmetic allows, at the sizes of its decoder, where every proposal is right."""
    bounds = {
        str(count): {"by_tokens": count + 1, "by_weights": round(GPT2.bound(count + 1, count), 3)}
        for count in heads
    }
    return {"speedup": PAPER, "bounds": bounds}


def taus(runs: Sequence[dict[str, Any]], kind: str, heads: int) -> list[float]:
    """Of every seed."""
    return [run["tau"] for run in runs if (run["kind"], run["heads"]) == (kind, heads)]


def below(first: Sequence[float], second: Sequence[float]) -> str:
    """Whether figures of several seeds bear out first <= second: `confirmed` where all of the second are at least as high
    as all of the first, `contradicted` where all are lower, `undecided` where the seeds overlap, or one has none."""
    if not first or not second:
        return "undecided"
    if min(second) >= max(first):
        return "confirmed"
    return "contradicted" if max(second) < min(first) else "undecided"


def summary(all_runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every number of heads and kind: means over the seeds, `spread` is the largest minus the smallest tau.

    `first` is by head the share of right first proposals, `first_three` that of rank 1 to 3, both given that the tokens
    before were among the proposals; `bound_here` and `bound_gpt2` are what the weights allow this tau to gain, at the sizes
    of this decoder and at the paper's; `same_captions` is the share that equals the frozen target's, null without one.
    """
    frozen = next((run["texts"] for run in all_runs if run["kind"] != KINDS["medusa-2"].name), None)
    rows = []
    for heads, kind in Counter((run["heads"], run["kind"]) for run in all_runs):
        runs = [run for run in all_runs if (run["heads"], run["kind"]) == (heads, kind)]
        tau = statistics.mean(run["tau"] for run in runs)
        rows.append({
            "heads": heads,
            "kind": kind,
            "seeds": len(runs),
            "tau": round(tau, 3),
            "spread": round(max(run["tau"] for run in runs) - min(run["tau"] for run in runs), 3),
            "alpha": round(statistics.mean(run["alpha"] for run in runs), 4),
            "first": [round(statistics.mean(run["hits"][k][0] for run in runs), 4) for k in range(heads)],
            "first_three": [
                round(statistics.mean(sum(run["hits"][k][:3]) for run in runs), 4) for k in range(heads)
            ],
            "tokens": sum(run["tokens"] for run in runs),
            "bound_here": round(TINY.bound(tau, heads), 3),
            "bound_gpt2": round(GPT2.bound(tau, heads), 3),
            **worth(runs, frozen),
        })  # fmt: skip
    return sorted(rows, key=lambda row: (row["heads"], row["kind"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, heads and captions."""
    lines = [
        "| heads | trained as | tau | spread | alpha | head right, by head | within 3 ranks | bound by weights, here | … at GPT-2's sizes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first, three = (" ".join(f"{x:.3f}" for x in row[name]) for name in ("first", "first_three"))
        lines.append(
            f"| {row['heads']} | {row['kind']} | {row['tau']:.3f} | {row['spread']:.3f} | {row['alpha']:.3f} | {first} | {three} "
            f"| {row['bound_here']:.2f} × | {row['bound_gpt2']:.2f} × |"
        )
    lines += [
        "",
        f"| heads | trained as | captions that {WORTH} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {row['heads']} | {row['kind']} | {worth_cells(row)} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
