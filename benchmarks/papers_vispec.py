"""ViSpec's comparison on a small model that reads pictures: Medusa, EAGLE-2 and ViSpec, and what each part of ViSpec adds.

    python -m benchmarks.papers_vispec --model MODEL --folder runs/vispec
    python -m benchmarks.papers_vispec --model MODEL --folder runs/vispec --arms medusa eagle vispec --seeds 1
    python -m benchmarks.papers_vispec --model MODEL --folder runs/vispec-1e-3 --rate 1e-3

MODEL is a model of tabletop scenes whose decoder reads pictures among its rows (tiny-qwen2.5-vl, or a recipe's `model`
folder). All arms learn from the target's own answers to the same scenes, for the same number of steps (ViSpec: half of
them in its first stage), at the rate that suits each kind or at one for all, with three seeds. Held-out scenes are decoded
plainly and with every draft, as a chain and as a dynamic tree, greedily and at temperature 1; tokens are counted, no time is
measured, and every text is compared with plain decoding's. What is in the folder is kept: the same command continues a
killed one; another command needs another folder. Writes results/papers-vispec.json, with --rate papers-vispec-RATE.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.calibrate import read_requests
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.runtime import Session
from vlmexport.runtime.speedup.stats import Stats

from benchmarks.machine import save
from benchmarks.vispec_runs import ARMS, LONGEST, Run, all_runs, answers, bundle, train

DEPTH, NODES = 4, 15
"""Of chains and trees: the authors' trees are four deep as well, of 30 nodes on models a thousand times as large."""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "chain": {"draft_length": DEPTH},
    "tree": {"draft_length": DEPTH, "draft_nodes": NODES},
}
SAMPLED = {"T = 0": {}, "T = 1": {"temperature": 1.0}}
MAIN = ("medusa", "eagle", "vispec")


def numeral(text: str) -> str:
    """The words of a number, which name the file of results. ValueError where they are none."""
    float(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-qwen2.5-vl")
    parser.add_argument("--folder", type=Path, required=True, help="of answers, trainings and bundles")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--count", type=int, default=2048, help="the target's own answers to train on")
    parser.add_argument("--validation", type=int, default=96, help="further ones, to choose the best by")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--rate",
        type=numeral,
        help="highest learning rate of all arms; default: what `vlmexport train` gives each kind",
    )
    parser.add_argument("--scenes", type=int, default=100, help="held-out ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--device", default="auto", help="of the trainings; auto: a GPU where PyTorch finds one"
    )
    parser.add_argument("--name", help="of the file of results; default: papers-vispec, with its --rate")
    options = parser.parse_args()
    name = options.name or "-".join(["papers-vispec", *filter(None, [options.rate])])
    rate = None if options.rate is None else float(options.rate)
    made = {
        "answers": options.count, "validation": options.validation, "steps": options.steps,
        "batch_size": options.batch_size, "rate": rate, "scenes": options.scenes,
    }  # fmt: skip
    runs = all_runs(options.arms, range(options.seeds))
    places = {run: options.folder / "counted" / f"{run.name}.json" for run in runs}
    kept = {run: json.loads(place.read_text()) for run, place in places.items() if place.exists()}
    for run, result in kept.items():
        if result.get("made") != made:
            parser.error(f"{places[run]} is of another command ({result.get('made')}); give another --folder")
    torch.set_num_threads(options.threads)
    target = load_target(options.model, options.device)
    told = {
        name: answers(options.model, options.folder, name, options.count, options.validation, options.threads)
        for name in sorted({ARMS[arm].data for arm in options.arms})
    }
    for run in runs:
        if run not in kept:
            train(
                run, options.folder, target, told[ARMS[run.arm].data],
                options.steps, options.batch_size, rate,
            )  # fmt: skip
            kept[run] = counted(run, options.folder, target, options) | {"made": made}
            places[run].parent.mkdir(exist_ok=True)
            places[run].write_text(json.dumps(kept[run]) + "\n")
        print(f"{run.name}: {kept[run]['tau']}", flush=True)
    results = [kept[run] for run in runs]
    rows = summary(results)
    print(table(rows))
    print(
        save(
            name,
            {
                "script": "benchmarks/papers_vispec.py",
                "model": target.name,
                "answers": options.count,
                "steps": options.steps,
                "batch_size": options.batch_size,
                "scenes": options.scenes,
                "depth": DEPTH,
                "nodes": NODES,
                "rows": rows,
                "order": {key: order(results, key) for key in results[0]["tau"]},
                "runs": results,
            },
            "torch",
            "transformers",
        )
    )


def counted(run: Run, folder: Path, target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """What a finished training's draft reaches on held-out scenes.

    `tau` is in tokens per step of the target, the bonus included, by way and temperature; `different` counts texts that
    are not those of plain decoding.
    """
    draft = open_draft(folder / "trained" / run.name)
    tau, different = {}, 0
    with Session.load(bundle(run, folder, options.model), threads=options.threads) as session:
        requests = read_requests(session.bundle.manifest, ["scenes:heldout"], options.scenes)
        for sampled, how in SAMPLED.items():
            asked = [{**r, **how, "max_new_tokens": LONGEST, "seed": n} for n, r in enumerate(requests)]
            plain = [session.generate(**each, draft="none").tokens for each in asked]
            for way, shape in WAYS.items():
                drafted = [session.generate(**each, draft=ARMS[run.arm].kind, **shape) for each in asked]
                total = Stats.total(result.stats for result in drafted)
                tau[f"{way}, {sampled}"] = round(total.tau, 4)
                different += sum(a != b.tokens for a, b in zip(plain, drafted, strict=True))
    return {
        "arm": run.arm,
        "seed": run.seed,
        "rate": draft.provenance["options"]["lr"],  # type: ignore[attr-defined]
        "target": target.fingerprint,
        "parameters": sum(p.numel() for p in draft.network.parameters()),  # type: ignore[attr-defined]
        "evaluation": draft.evaluation,  # type: ignore[attr-defined]
        "tau": tau,
        "texts": len(SAMPLED) * len(WAYS) * options.scenes,
        "different": different,
    }


def summary(all_runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each arm: means over its seeds, `spread` their largest minus their smallest."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for run in all_runs:
        arms.setdefault(run["arm"], []).append(run)
    return [
        {
            "arm": arm,
            "title": ARMS[arm].title,
            "seeds": len(runs),
            "rate": runs[0]["rate"],
            "parameters": runs[0]["parameters"],
            "tau": {
                key: round(statistics.mean(run["tau"][key] for run in runs), 3) for key in runs[0]["tau"]
            },
            "spread": {
                key: round(max(run["tau"][key] for run in runs) - min(run["tau"][key] for run in runs), 3)
                for key in runs[0]["tau"]
            },
            "texts": sum(run["texts"] for run in runs),
            "different": sum(run["different"] for run in runs),
        }
        for arm, runs in arms.items()
    ]


def order(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    """What became of Medusa < EAGLE-2 < ViSpec: `confirmed` where every seed of one is below every seed of the next,
    `contradicted` where some pair is the other way round, else `undecided`."""
    taus = [[run["tau"][key] for run in runs if run["arm"] == arm] for arm in MAIN]
    if not all(taus):
        return "undecided"
    pairs = list(pairwise(taus))
    if all(max(below) < min(above) for below, above in pairs):
        return "confirmed"
    return "contradicted" if any(min(below) > max(above) for below, above in pairs) else "undecided"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For docs/results/papers/vispec.md."""
    keys = list(rows[0]["tau"])
    lines = [
        "| draft | parameters | " + " | ".join(f"tau, {key}" for key in keys) + " | texts that differ |",
        "|---" * (3 + len(keys)) + "|",
    ]
    for row in rows:
        taus = " | ".join(f"{row['tau'][key]:.2f} (± {row['spread'][key] / 2:.2f})" for key in keys)
        lines.append(
            f"| {row['title']} | {row['parameters']:,} | {taus} | {row['different']} of {row['texts']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
