"""FastVLM's appendix B on tiny-blip2-flant5: which shape of imitation network, by agreement with the target and FLOPs.

    python benchmarks/papers_fastvlm_search.py --work runs/drafts

What `vlmexport train --search` does, on the answers that the recipe of the shipped drafts lets the target give
(calibration/workshop/recipes/tiny_drafts.py, whose folder --work may be). Counts only, no clock. Writes
results/papers-fastvlm-search-tiny-blip2-flant5.json.
"""

from __future__ import annotations

from imitation_work import prepared, work_parser
from machine import save
from vlmexport.calibration.training.imitation_search import search_shapes, table
from vlmexport.calibration.training.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.training.options import LoopOptions
from vlmexport.calibration.workshop.recipes.tiny_drafts import MODEL


def main() -> None:
    parser = work_parser(__doc__, 150)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    workshop, told = prepared(options)
    loop = LoopOptions(options.steps, options.batch_size, seed=options.seed)
    found = search_shapes(
        workshop.target,
        told.captions,
        ImitationOptions(options.layer, ce=1.0, kd=0.0),
        loop,
        {"attention_heads": 0},  # the table in docs/papers.md is of the shapes without
        options.trials,
        options.work / "runs" / f"search-n{options.layer}-{options.steps}-{options.seed}",
        validation=told.validation,
        cache=options.work / "features",
        eval_every=options.steps,
        save_every=options.steps,
    )
    print("\n".join(table(found)))
    result = {
        "script": "benchmarks/papers_fastvlm_search.py",
        "steps": options.steps,
        "records_per_step": loop.batch_size,
        **{name: found[name] for name in ("target", "layer", "early_exit", "front", "trials", "search")},
    }
    print(save(f"papers-fastvlm-search-{MODEL}", result, "torch", "transformers", "optuna"))


if __name__ == "__main__":
    main()
