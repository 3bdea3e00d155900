"""How far a seed moves FastVLM's comparison of methods: imitation networks trained alike with several seeds.

    python -m benchmarks.papers_fastvlm_seeds --work runs/drafts --folder runs/seeds

The networks at L/4 and L/2 of `papers_fastvlm_methods.py`, whose drafts ship and have one seed, are trained here with three, with
a residual connection (`workshop.COMPARED`), fewer texts and steps; each seed's go into a bundle of their own and are measured as that
script measures: texts that differ, acceptance and gain by weights at the chain length that suits the seed and at FastVLM's,
and what they write with nobody to verify it. Counts only, no clock. Finished trainings and bundles are reread. Writes
results/papers-fastvlm-seeds.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.layer_weights import Weights
from vlmexport.exporter.pipeline import BuildRequest, build_bundle

from benchmarks.intervals import between
from benchmarks.machine import save
from benchmarks.papers_fastvlm_methods import PUBLISHED, Row, imitation, measured
from recipes.tiny_drafts import prepare
from recipes.workshop import COMPARED, Workshop

MODELS = ("tiny-blip2-flant5", "tiny-qwen2.5-vl")
TASKS = ("captions", "answers")
"""About pictures, which is all that these networks learn."""
COUNTED = ("alpha", "tau", "by_weights")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="for answers, rows and trainings")
    parser.add_argument("--folder", type=Path, required=True, help="for the bundles, which are kept")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--captions", type=int, default=512, help="training scenes; as many questions")
    parser.add_argument("--heldout", type=int, default=150, help="as other tables that share --work have it")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scenes", type=int, default=200, help="held-out scenes that measure")
    parser.add_argument("--chosen", type=int, default=24, help="validation scenes that choose chain lengths")
    parser.add_argument("--threads", type=int, default=1, help="of what is computed in PyTorch")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    by_model: dict[str, Any] = {}
    for model in options.models:
        workshop = prepare(model, options.work, options.captions, options.heldout)
        seeds = []
        for seed in range(options.seeds):
            folder = options.folder / f"{model}-{options.captions}-{options.steps}-{seed}"
            seeds.append(counted(workshop, options.work, folder, seed, options))
        by_model[model] = {"fingerprint": workshop.target.fingerprint, "tasks": over_seeds(seeds)}
        print("\n".join(lines(model, by_model[model]["tasks"])), flush=True)
    settings = ("seeds", "captions", "steps", "scenes", "chosen")
    result = {"script": "benchmarks/papers_fastvlm_seeds.py", **{n: getattr(options, n) for n in settings}}
    if not options.no_save:
        print(
            save(
                "papers-fastvlm-seeds",
                result | {"models": by_model},
                "torch",
                "transformers",
                "pycocoevalcap",
            )
        )


def counted(
    workshop: Workshop, work: Path, folder: Path, seed: int, options: argparse.Namespace
) -> dict[str, dict[str, Row]]:
    """Rows of the networks of one seed, by task; see `papers_fastvlm_methods.measured`."""
    target, drafts, runs = workshop.target, [], []
    for layer in workshop.features:
        kind = ImitationOptions(layer, **COMPARED)  # type: ignore[arg-type]
        name = target.fingerprint.removeprefix("sha256:")[:12]
        runs.append(work / "runs" / f"seeds-{name}-n{layer}-{options.captions}-{options.steps}-{seed}")
        draft = workshop.train(
            kind, LoopOptions(options.steps, workshop.batch, workshop.lr, seed=seed), runs[-1]
        )
        drafts.append(draft)
    if not (folder / "manifest.json").exists():
        build_bundle(BuildRequest(model=target.name, output=folder, drafts=[*map(str, runs)]))
    methods = [imitation(draft, Weights.of(target)) for draft in drafts]
    return measured(target, folder, methods, drafts, options.scenes, options.chosen, TASKS)


def over_seeds(seeds: Sequence[Mapping[str, Mapping[str, Row]]]) -> dict[str, dict[str, Row]]:
    """Rows by task: each figure a list, seed by seed, with its mean; a draft's two rows are that of the length which suits
    the seed, and that of the paper's."""
    by_task: dict[str, dict[str, Row]] = {}
    for task in seeds[0]:
        gathered: dict[str, list[Row]] = {}
        for rows in (one[task] for one in seeds):
            for name, row in named(task, rows):
                gathered.setdefault(name, []).append(row)
        by_task[task] = {
            name: {key: [row[key] for row in rows] for key in rows[0] if key not in ("draft", "share")}
            | {f"mean_{key}": round(statistics.mean(row[key] for row in rows), 4) for key in numbers(rows[0])}
            for name, rows in gathered.items()
        }
    return by_task


def named(task: str, rows: Mapping[str, Row]) -> Iterator[tuple[str, Row]]:
    """Rows of one seed under names that all seeds share; the model's own row is the same for each."""
    for name, row in rows.items():
        method, _, length = name.partition(", d = ")
        if not length:
            yield from () if name == "plain" else [(name, row)]
            continue
        chosen = next(other for other in rows if other.startswith(f"{method}, d = "))
        if name == chosen:
            yield f"{method}, its own d", row
        if int(length) == PUBLISHED[task]:
            yield f"{method}, d = {length}", row


def numbers(row: Row) -> list[str]:
    """What of a row has a mean over seeds."""
    return [*COUNTED] if "draft" in row else [name for name in row if name != "by_weights"]


def lines(model: str, tasks: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    """Rows of a Markdown table: mean [least – most]."""
    for task, rows in tasks.items():
        for name, row in rows.items():
            values = (f"{name} {between(row[name])}" for name in row if f"mean_{name}" in row)
            also = f"d {row['draft_length']}, differ {sum(row['differ'])}; " if "differ" in row else ""
            yield f"| {model} | {task} | {name} | {also}{'; '.join(values)} |"


if __name__ == "__main__":
    main()
