"""FastVLM's ablation (table 1) and acceptance by position (figure 6) on tiny-blip2-flant5 or SmolLM2-135M.

    python -m recipes.tiny_drafts --work runs/drafts --out runs/drafts/out
    python -m benchmarks.papers_fastvlm_table1 --work runs/drafts

    python -m recipes.smollm2_draft --model runs/smollm2 --work runs/smollm2-draft --out runs/smollm2-n10
    python -m benchmarks.papers_fastvlm_table1 --smollm2 runs/smollm2 --work runs/smollm2-draft --seeds 1 --steps 250

Every row is trained on the same cached rows of the target's own answers, and measured as greedy acceptance on
held-out scenes or topics. Writes results/papers-fastvlm-table1-MODEL.json and docs/images/alpha-by-position-MODEL.png. With
--shape default and a --name of their own, networks as `vlmexport train` makes them. The fusions of the last residuals are rows of their own:

    python -m benchmarks.papers_fastvlm_table1 --work runs/drafts --name fusions --layers 3 --rows "Our (CE)" "Our+CS" \\
      "Our+CS, concat" "Our+CS, concat by the cosine" "Our+CS, attention" "Our+CS, attention by the cosine"
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from vlmexport.calibration.evaluation.acceptance import Acceptance
from vlmexport.calibration.evaluation.plot import plot_by_position
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions

from benchmarks.machine import save
from recipes.smollm2_draft import reopen
from recipes.tiny_drafts import CAPTIONS, HELDOUT, MODEL, prepare
from recipes.workshop import SHAPE, Workshop

PRESETS = ImitationOptions.presets
ROWS: dict[str, dict[str, object]] = {
    "Our (CE)": PRESETS["our"],
    "Our+CS": PRESETS["our+cs"],
    "Our+CS+KD": PRESETS["our+cs+kd"],
    "Our+CS+KD, forward KL": {**PRESETS["our+cs+kd"], "kd_distance": "forward"},
    "Our+CS+KD, TV": {**PRESETS["our+cs+kd"], "kd_distance": "tv"},
}
FUSIONS: dict[str, dict[str, object]] = {
    f"Our+CS, {name}": {**PRESETS["our+cs"], **fusion}
    for name, fusion in (
        ("concat", {"fusion": "concat"}),
        ("concat by the cosine", {"fusion": "concat", "fusion_loss": "cosine"}),
        ("attention", {"fusion": "attention"}),
        ("attention by the cosine", {"fusion": "attention", "fusion_loss": "cosine"}),
    )
}
"""The paper's other fusions, trained apart from the cosine and, as published, by it."""
ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="a target of tabletop scenes")
    parser.add_argument("--smollm2", help="in its place: the checkpoint of a finished smollm2_draft recipe")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--captions", type=int, default=CAPTIONS)
    parser.add_argument("--heldout", type=int, default=HELDOUT)
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*ROWS, *FUSIONS],
        default=list(ROWS),
        metavar="ROW",
        help=f"default: the paper's losses and other distances; also {', '.join(FUSIONS)}",
    )
    parser.add_argument("--name", default="table1", help="of the result")
    parser.add_argument(
        "--shape",
        choices=("compared", "default"),
        default="compared",
        help="of the network, and its learning rate: those of docs/results/papers/fastvlm.md's tables, or the defaults of vlmexport train",
    )
    parser.add_argument("--layers", nargs="+", type=int, metavar="N", help="default: all that were prepared")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto", help="auto: a GPU where PyTorch finds one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    if options.smollm2:
        workshop = reopen(options.smollm2, options.work, options.device)
        name, data = "smollm2-135m", "chat prompts"
    else:
        workshop = prepare(options.model, options.work, options.captions, options.heldout, options.device)
        name, data = options.model, "scenes"
    rows, curves = [], {}
    for layer in options.layers or workshop.features:
        curves[f"early exit, n={layer}"] = exit_ = workshop.heldout(layer, nn.Identity())
        rows.append(row(layer, "early exit", [exit_]))
        for losses in options.rows:
            acceptances, validation = train_and_measure(
                workshop, layer, losses, options.steps, options.seeds, options.work, options.shape
            )
            rows.append(row(layer, losses, acceptances) | {"validation": validation})
            if losses == "Our+CS+KD":
                curves[f"{losses}, n={layer}"] = acceptances[0]
            print(table(rows[-1:]), flush=True)
    if "Our+CS+KD" in options.rows and options.shape == "compared":
        plot_by_position(curves, ROOT / "docs" / "images" / f"alpha-by-position-{name}.png")
    result = {
        "script": "benchmarks/papers_fastvlm_table1.py",
        "model": {
            "name": workshop.target.name,
            "fingerprint": workshop.target.fingerprint,
            "layers": workshop.target.num_layers,
        },
        "data": {
            "kind": data,
            "train_records": {n: len(f.train) for n, f in workshop.features.items()},
            "heldout_records": {n: len(f.heldout) for n, f in workshop.features.items()},
        },
        "steps": options.steps,
        "records_per_step": workshop.batch,
        "seeds": options.seeds,
        "shape": options.shape,
        "rows": rows,
        "by_position": {k: v.by_position for k, v in curves.items()},
        "seconds": round(time.perf_counter() - begin),
    }
    print(table(rows))
    print(save(f"papers-fastvlm-{options.name}-{name}", result, "torch", "transformers"))


def train_and_measure(
    workshop: Workshop,
    layer: int,
    losses: str,
    steps: int,
    seeds: int,
    work: Path,
    shape: str = "compared",
) -> tuple[list[Acceptance], dict[str, float]]:
    """Greedy acceptance of one row of the table, by seed, and means of the losses on validation scenes; a finished run is
    reread."""
    acceptances, parts = [], []
    for seed in range(seeds):
        form = SHAPE if shape == "compared" else {}
        kind = ImitationOptions(layer, **(form | (ROWS | FUSIONS)[losses]))  # type: ignore[arg-type]
        rate = workshop.lr if shape == "compared" else None
        options = LoopOptions(steps, workshop.batch, rate, seed=seed)
        slug = "".join(c if c.isalnum() else "-" for c in losses.lower())
        slug += "" if shape == "compared" else f"-{shape}"
        out = work / "runs" / f"table1-{workshop.target.fingerprint[7:19]}-n{layer}-{slug}-{seed}-{steps}"
        draft = workshop.train(kind, options, out)
        acceptances.append(workshop.heldout(layer, draft.network))
        parts.append(draft.evaluation["validation"])
    return acceptances, {name: round(statistics.mean(p[name] for p in parts), 5) for name in parts[0]}


def row(layer: int, name: str, acceptances: list[Acceptance]) -> dict[str, object]:
    """Means over seeds; spread is largest minus smallest alpha."""
    alphas = [r.alpha for r in acceptances]
    return {
        "layer": layer,
        "losses": name,
        "alpha": round(statistics.mean(alphas), 5),
        "alpha_spread": round(max(alphas) - min(alphas), 5),
        "tau": round(statistics.mean(r.tau for r in acceptances), 4),
        "overlap": round(statistics.mean(r.overlap for r in acceptances), 5),
        "agreement": round(statistics.mean(r.agreement for r in acceptances), 5),
        "tokens": acceptances[0].tokens,
        "draft_length": acceptances[0].draft_length,
        "evaluated": [r.evaluated for r in acceptances],
        "accepted": [r.accepted for r in acceptances],
    }


def table(rows: list[dict[str, object]]) -> str:
    """The rows as Markdown."""
    lines = ["| n | losses | alpha | spread | tau (d = 5) | Σmin(p, q) |", "|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(
            f"| {r['layer']} | {r['losses']} | {r['alpha']:.4f} | {r['alpha_spread']:.4f} | {r['tau']:.3f} "
            f"| {r['overlap']:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
