"""FastVLM's ablation (table 1) and acceptance by position (figure 6) on tiny-blip2-flant5.

    python -m vlmexport.calibration.recipes.tiny_drafts --work runs/drafts --out runs/drafts/out
    python benchmarks/papers_fastvlm_table1.py --work runs/drafts

Every row is trained with several seeds on the same cached rows of the target's own answers, and measured as
greedy acceptance on held-out scenes. Writes results/papers-fastvlm-table1.json and docs/images/alpha-by-position.png.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from machine import save
from torch import nn
from vlmexport.calibration.evaluation.acceptance import Acceptance
from vlmexport.calibration.evaluation.plot import plot_by_position
from vlmexport.calibration.recipes.tiny_drafts import CAPTIONS, HELDOUT, LAYERS, MODEL, prepare
from vlmexport.calibration.training.config import PRESETS, TrainConfig

ROWS: dict[str, dict[str, object]] = {
    "Our (CE)": PRESETS["our"],
    "Our+CS": PRESETS["our+cs"],
    "Our+CS+KD": PRESETS["our+cs+kd"],
    "Our+CS+KD, forward KL": {**PRESETS["our+cs+kd"], "kd_distance": "forward"},
    "Our+CS+KD, TV": {**PRESETS["our+cs+kd"], "kd_distance": "tv"},
}
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "alpha-by-position.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--captions", type=int, default=CAPTIONS)
    parser.add_argument("--heldout", type=int, default=HELDOUT)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    workshop = prepare(options.model, options.work, options.captions, options.heldout)
    rows, curves = [], {}
    for layer in LAYERS:
        curves[f"early exit, n={layer}"] = exit_ = workshop.heldout(layer, nn.Identity())
        rows.append(row(layer, "early exit", [exit_]))
        for name, losses in ROWS.items():
            found = []
            for seed in range(options.seeds):
                config = TrainConfig(layer, steps=options.steps, seed=seed, **losses)  # type: ignore[arg-type]
                slug = "".join(c if c.isalnum() else "-" for c in name.lower())
                print_name = workshop.target.fingerprint[7:19]
                out = options.work / "runs" / f"table1-{print_name}-n{layer}-{slug}-{seed}"
                found.append(workshop.heldout(layer, workshop.train(config, out).network))
            rows.append(row(layer, name, found))
            if name == "Our+CS+KD":
                curves[f"{name}, n={layer}"] = found[0]
    plot_by_position(curves, PICTURE)
    result = {
        "script": "benchmarks/papers_fastvlm_table1.py",
        "model": {
            "name": workshop.target.name,
            "fingerprint": workshop.target.fingerprint,
            "layers": workshop.target.num_layers,
        },
        "data": {
            "train": f"own answers to scenes:train:{options.captions} and questions",
            "test": f"own greedy captions of scenes:heldout:{options.heldout}",
        },
        "steps": options.steps,
        "seeds": options.seeds,
        "rows": rows,
        "by_position": {k: v.by_position for k, v in curves.items()},
        "seconds": round(time.perf_counter() - begin),
    }
    print(table(rows))
    print(save("papers-fastvlm-table1", result, "torch", "transformers"))


def row(layer: int, name: str, found: list[Acceptance]) -> dict[str, object]:
    """Means over seeds; spread is largest minus smallest alpha."""
    alphas = [r.alpha for r in found]
    return {
        "layer": layer,
        "losses": name,
        "alpha": round(statistics.mean(alphas), 5),
        "alpha_spread": round(max(alphas) - min(alphas), 5),
        "tau": round(statistics.mean(r.tau for r in found), 4),
        "overlap": round(statistics.mean(r.overlap for r in found), 5),
        "agreement": round(statistics.mean(r.agreement for r in found), 5),
        "tokens": found[0].tokens,
        "draft_length": found[0].draft_length,
        "evaluated": [r.evaluated for r in found],
        "accepted": [r.accepted for r in found],
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
