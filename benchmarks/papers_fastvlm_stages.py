"""What FastVLM's stages that change the target do: a backbone that learns the references first (section 5.1), and epochs in which
it learns with the network before it stays as it is (appendix C).

    python -m benchmarks.papers_fastvlm_stages --folder runs/stages

Trains imitation networks for tiny-vit-gpt2 on reference captions, three seeds of each kind, for as many steps of the network;
then decodes held-out scenes plainly and with the draft, on a bundle of the draft's own target. Counts only, no clock. What is in the
folder is kept, so the same command continues a killed one. Writes results/papers-fastvlm-stages-tiny-vit-gpt2.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.data import load_records
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import load_target
from vlmexport.calibration.training.run import Schedule, train_draft
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.drafts.common.files import MODEL
from vlmexport.exporter.pipeline import BuildRequest, build_bundle

from benchmarks.captioning_quality import WORTH, captions, decoded, worth, worth_cells
from benchmarks.captioning_runs import TARGET
from benchmarks.machine import save
from recipes.tiny_drafts import TOLD
from recipes.workshop import COMPARED, DRAFT_LENGTH

NAME = "papers-fastvlm-stages"
STAGES = {"frozen": (False, False), "fine-tuned": (True, False), "joint": (False, True), "both": (True, True)}
"""By name: whether the target learns alone first, and whether it then learns with the network for half of its steps."""


@dataclass(frozen=True)
class Run:
    """One training: one of `STAGES`, and the seed."""

    stage: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folders."""
        return f"{self.stage}-seed-{self.seed}"

    @property
    def changes(self) -> bool:
        """Whether the target is another one afterwards."""
        return any(STAGES[self.stage])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of trainings and bundles")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--captions", type=int, default=2048, help="references, to train on")
    parser.add_argument(
        "--validation", type=int, default=128, help="further ones, to choose the best draft by"
    )
    parser.add_argument("--steps", type=int, default=256, help="of the network; by default two epochs")
    parser.add_argument("--fine-tune", type=int, default=128, help="steps before them; by default an epoch")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--scenes", type=int, default=160, help="held-out ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--device", default="auto", help="of the trainings; auto: a GPU where PyTorch finds one"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs = []
    for run in [Run(stage, seed) for seed in range(options.seeds) for stage in options.stages]:
        kept = options.folder / "quality" / f"{run.name}.json"
        if not kept.exists():
            train(run, options)
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(quality(run, options)) + "\n")
        runs.append(json.loads(kept.read_text()))
        print(f"{run.name}: alpha {runs[-1]['alpha']}", flush=True)
    rows = summary(runs)
    print(table(rows))
    told = {n: getattr(options, n) for n in ("layer", "captions", "validation", "steps", "fine_tune")}
    result = {
        "script": "benchmarks/papers_fastvlm_stages.py",
        "target": TARGET,
        **told,
        "batch_size": options.batch_size,
        "scenes": options.scenes,
        "draft_length": DRAFT_LENGTH,
        "rows": rows,
        "runs": [{k: v for k, v in run.items() if k != "texts"} for run in runs],
    }
    print(save(f"{NAME}-{TARGET}", result, "torch", "transformers"))


def train(run: Run, options: argparse.Namespace) -> None:
    """Trains, or continues; the network has as many steps and the same records in every stage."""
    first, joint = STAGES[run.stage]
    alone = options.fine_tune if first else 0
    own = ImitationOptions(options.layer, fine_tune=alone, joint=joint, **COMPARED)  # type: ignore[arg-type]
    steps = alone + options.steps
    train_draft(
        load_target(TARGET, options.device),
        load_records(f"scenes-captions:train:{options.captions}:offset={TOLD}"),
        own,
        LoopOptions(steps, options.batch_size, seed=run.seed),
        options.folder / "trained" / run.name,
        load_records(f"scenes-captions:validation:{options.validation}"),
        cache=None if run.changes else options.folder / "features",
        schedule=Schedule(max(1, options.steps // 4), max(1, options.steps // 8)),
    )


def quality(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Of a finished training on the first held-out scenes: what chains of its draft reach, how many captions differ from plain
    decoding of the same bundle, and what its target's captions are worth."""
    out = options.folder / "trained" / run.name
    model = str(out / "best" / MODEL) if run.changes else TARGET
    bundle = options.folder / "bundles" / run.name
    if not (bundle / "manifest.json").exists():
        build_bundle(BuildRequest(model=model, output=bundle, drafts=[str(out)], draft_layer=options.layer))
    records = load_records(f"scenes-captions:heldout:{options.scenes}")
    plain, total, different = decoded(bundle, records, "imitation", DRAFT_LENGTH)
    return {
        "stage": run.stage,
        "seed": run.seed,
        "target": fingerprint(open_checkpoint(model)),
        "alpha": round(total.alpha or 0.0, 5),
        "tau": round(total.tau, 4),
        "different": different,
        "captions": captions(model, plain),
        "texts": [result.text for result in plain],
    }


def summary(all_runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every stage, in their order: means over the seeds, `spread` is the largest minus the smallest alpha;
    `same_captions` is the share that the unchanged target has word by word, null without one."""
    frozen = next((run["texts"] for run in all_runs if run["stage"] == "frozen"), None)
    rows = []
    for stage in Counter(run["stage"] for run in all_runs):
        runs = [run for run in all_runs if run["stage"] == stage]
        alphas = [run["alpha"] for run in runs]
        rows.append({
            "stage": stage,
            "seeds": len(runs),
            "alpha": round(statistics.mean(alphas), 4),
            "spread": round(max(alphas) - min(alphas), 4),
            "tau": round(statistics.mean(run["tau"] for run in runs), 3),
            **worth(runs, frozen),
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        f"| target | alpha | spread | tau | {WORTH} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['stage']} | {row['alpha']:.3f} | {row['spread']:.3f} | {row['tau']:.2f} "
            f"| {worth_cells(row)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
