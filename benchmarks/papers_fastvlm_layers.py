"""FastVLM's choice of n (its table 6 and figure 8): imitation networks after 2 to 10 of the 12 layers of `tiny-blip2-flant5`.

    python -m benchmarks.papers_fastvlm_layers --work runs/drafts

Every network has a residual connection (`workshop.COMPARED`) and learns from the same answers, those of `papers_fastvlm_table1.py
--captions 512`; greedy acceptance on held-out captions in chains of 5. By weights: what (1 + a + … + a^d) / (1 + share × d)
gives at the best d up to 8, with the acceptance of the row at every place. No clock. Writes
results/papers-fastvlm-layers.json.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.layer_weights import Weights

from benchmarks.machine import save
from benchmarks.papers_bounds import kept
from benchmarks.papers_fastvlm_table1 import row
from recipes.tiny_drafts import MODEL, prepare
from recipes.workshop import COMPARED, Workshop, cached_features

LAYERS = (2, 3, 4, 6, 8, 10)
MOST = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", default=MODEL, help="a target of tabletop scenes")
    parser.add_argument(
        "--layers", nargs="+", type=int, choices=LAYERS, default=LAYERS, metavar="N", help="rows"
    )
    parser.add_argument("--captions", type=int, default=512)
    parser.add_argument("--heldout", type=int, default=150)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workshop = prepared(options.model, options.work, options.captions, options.heldout)
    weights = Weights.of(workshop.target)
    rows = []
    print("| n | reads | early exit | alpha | spread | tau | Σmin(p, q) | best d | by weights | below |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for layer in options.layers:
        rows.append(measured(workshop, layer, weights, options.steps, options.seeds, options.work))
        print(line(rows[-1]), flush=True)
    result = {
        "script": "benchmarks/papers_fastvlm_layers.py",
        "model": {"name": workshop.target.name, "fingerprint": workshop.target.fingerprint},
        "captions": options.captions, "heldout": options.heldout, "steps": options.steps, "seeds": options.seeds,
        "rows": rows,
    }  # fmt: skip
    if not options.no_save:
        print(save("papers-fastvlm-layers", result, "torch", "transformers"))


def prepared(model: str, work: Path, captions: int, heldout: int) -> Workshop:
    """The target's answers as other tables have them, and its rows after `LAYERS`."""
    workshop = prepare(model, work, captions, heldout)
    answers = workshop.answers
    assert answers is not None
    features = cached_features(
        workshop.target, answers.train, answers.validation, answers.heldout, LAYERS, work / "features"
    )
    return replace(workshop, features=features)


def measured(
    workshop: Workshop, layer: int, weights: Weights, steps: int, seeds: int, work: Path
) -> dict[str, Any]:
    """A row: means over seeds, as in table 1. Finished trainings are reread."""
    acceptances, share = [], 0.0
    for seed in range(seeds):
        kind = ImitationOptions(layer, **COMPARED)  # type: ignore[arg-type]
        run = (
            work
            / "runs"
            / f"layers-{workshop.target.fingerprint.removeprefix('sha256:')[:12]}-n{layer}-{seed}-{steps}"
        )
        draft = workshop.train(kind, LoopOptions(steps, workshop.batch, workshop.lr, seed=seed), run)
        acceptances.append(workshop.heldout(layer, draft.network))
        share = weights.exit_with(layer, draft.network)
    means = row(layer, "CE, CS and forward KL", acceptances)
    alpha = statistics.mean(each.alpha for each in acceptances)
    gains = {d: kept(alpha, d) / (1 + share * d) for d in range(1, MOST + 1)}
    best = max(gains, key=lambda d: gains[d])
    return means | {
        "share": round(share, 4),
        "early_exit": round(workshop.heldout(layer, nn.Identity()).alpha, 5),
        "best_length": best,
        "by_weights": round(gains[best], 4),
        "limit": round(1 / share, 4),
    }


def line(one: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    return (
        f"| {one['layer']} | {100 * one['share']:.0f} % | {one['early_exit']:.3f} | {one['alpha']:.3f} | {one['alpha_spread']:.3f} | "
        f"{one['tau']:.2f} | {one['overlap']:.3f} | {one['best_length']} | {one['by_weights']:.2f} × | {one['limit']:.2f} × |"
    )


if __name__ == "__main__":
    main()
