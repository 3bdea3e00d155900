"""FastVLM's appendix B on tiny-blip2-flant5: which shape of imitation network, by agreement with the target and FLOPs.

    python -m benchmarks.papers_fastvlm_search --work runs/drafts

What `vlmexport train --search` does, once a seed, on the answers that the recipe of the shipped drafts lets the target give
(recipes/tiny_drafts.py, whose folder --work may be). As many trials as there are shapes: every seed tries
all of them. The front is that of the mean agreements; its shapes, that which docs/results/papers/fastvlm.md compares elsewhere and the default of `train` are then
trained with --full-steps of 64 records at each of --rates, and measured on held-out answers in chains of 5. Counts only, no
clock. Writes
results/papers-fastvlm-search-tiny-blip2-flant5.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.training.imitation_search import search_shapes
from vlmexport.calibration.training.run import FeatureCache, Schedule
from vlmexport.calibration.training.search_space import Trial, front, shapes

from benchmarks.imitation_work import prepared, work_parser
from benchmarks.intervals import between
from benchmarks.machine import save
from recipes.tiny_drafts import MODEL
from recipes.workshop import SHAPE, Workshop

FIXED = {"attention_heads": 0}
"""The table in docs/results/papers/fastvlm.md is of the shapes without attention; it has one of its own."""
LOSSES: dict[str, Any] = dict(ImitationOptions.presets["our"])


def main() -> None:
    parser = work_parser(__doc__, 120)
    parser.add_argument("--trials", type=int, default=len(shapes(FIXED)), help="of each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--full-steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-2], help="of the full trainings")
    options = parser.parse_args()
    workshop, told = prepared(options)
    documents = []
    for seed in range(options.seeds):
        documents.append(
            search_shapes(
                workshop.target,
                told.captions,
                ImitationOptions(options.layer, **LOSSES),
                LoopOptions(options.steps, options.batch_size, seed=seed),
                FIXED,
                options.trials,
                options.work / "runs" / f"search-n{options.layer}-{options.steps}-{seed}",
                validation=told.validation,
                cache=FeatureCache(options.work / "features"),
                schedule=Schedule(options.steps, options.steps),
            )
        )
    results = [searched(shape, documents) for shape in shapes(FIXED) if tried(shape, documents[0])]
    best = front([Trial(row["shape"], row["mean"], row["flops"]) for row in results])
    named = {"compared": SHAPE, "default": {name: getattr(ImitationOptions(1), name) for name in SHAPE}}
    rows = [row for row in results if row["shape"] in [*(trial.shape for trial in best), *named.values()]]
    for row in rows:
        row["full"] = [in_full(workshop, row["shape"], rate, options) for rate in options.rates]
    rows.sort(key=lambda row: row["flops"])
    print("\n".join(lines(documents[0]["early_exit"], rows, named, options.rates)))
    result = {
        "script": "benchmarks/papers_fastvlm_search.py",
        "captions": options.captions, "heldout": options.heldout,
        "steps": options.steps, "records_per_step": options.batch_size, "seeds": options.seeds,
        "full_steps": options.full_steps,
        **{name: documents[0][name] for name in ("target", "layer", "early_exit")},
        "front": [trial.shape for trial in best], **named, "shapes": results,
    }  # fmt: skip
    print(save(f"papers-fastvlm-search-{MODEL}", result, "torch", "transformers", "optuna"))


def tried(shape: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The trial of a shape in what a search found."""
    return next((trial for trial in document["trials"] if trial["shape"] == shape), None)


def searched(shape: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A shape with the agreement of every seed that tried it."""
    trials = [trial for document in documents if (trial := tried(shape, document))]
    agreement = [round(trial["agreement"], 4) for trial in trials]
    flops = trials[0]["flops"]
    return {"shape": shape, "flops": flops, "agreement": agreement, "mean": statistics.mean(agreement)}


def in_full(
    workshop: Workshop, shape: Mapping[str, Any], rate: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Acceptance of a shape on held-out answers, by seed, after --full-steps at a rate. Finished trainings are reread."""
    alpha, tau = [], []
    for seed in range(options.seeds):
        name = "-".join(map(str, shape.values()))
        run = options.work / "runs" / f"shape-n{options.layer}-{options.full_steps}-{rate:g}-{seed}-{name}"
        kind = ImitationOptions(options.layer, **LOSSES, **shape)
        draft = workshop.train(kind, LoopOptions(options.full_steps, workshop.batch, rate, seed=seed), run)
        acceptance = workshop.heldout(options.layer, draft.network)
        alpha.append(round(acceptance.alpha, 4))
        tau.append(round(acceptance.tau, 3))
    return {"rate": rate, "alpha": alpha, "tau": tau}


def lines(
    early_exit: float,
    rows: Sequence[Mapping[str, Any]],
    named: Mapping[str, Mapping[str, Any]],
    rates: Sequence[float],
) -> Iterator[str]:
    """A Markdown table, cheapest first; means with the least and the most of the seeds."""
    heads = [f"alpha, in full at {rate:g} | tau" for rate in rates]
    yield f"| shape | FLOPs per row | agreement, searched | {' | '.join(heads)} |"
    yield "|---" * (3 + 2 * len(rates)) + "|"
    yield f"| early exit, no network | 0 | {early_exit:.3f} {'| ' * (2 * len(rates))}|"
    for row in rows:
        shape = row["shape"]
        words = [f"{shape['num_linear']} linear"]
        words += [f"{name} {shape[name]}" for name in ("activation", "norm", "residual")]
        words += [name for name, other in named.items() if other == shape]
        full = [f"{between(one['alpha'])} | {statistics.mean(one['tau']):.2f}" for one in row["full"]]
        yield f"| {', '.join(words)} | {row['flops']:,} | {between(row['agreement'])} | {' | '.join(full)} |"


if __name__ == "__main__":
    main()
