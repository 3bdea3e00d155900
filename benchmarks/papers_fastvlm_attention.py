"""What attention over exit rows gives an imitation network (FastVLM, appendix B) of tiny-blip2-flant5, at equal steps.

    python -m benchmarks.papers_fastvlm_attention --work runs/drafts

Trains a network without attention and one with for as many steps on the same answers, both with a residual connection
(`workshop.COMPARED`; --work may be the folder of recipes/tiny_drafts.py), and counts what each would have accepted of
held-out captions. Counts only, no clock. Writes results/papers-fastvlm-attention-tiny-blip2-flant5.json.
"""

from __future__ import annotations

from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.training.run import train_draft
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft

from benchmarks.imitation_work import prepared, work_parser
from benchmarks.machine import save
from recipes.tiny_drafts import MODEL, STEPS
from recipes.workshop import COMPARED

FIGURES = ("alpha", "tau", "agreement", "overlap", "tokens")


def main() -> None:
    parser = work_parser(__doc__, STEPS)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    workshop, told = prepared(options)
    target = workshop.target
    lines = []
    for seed in range(options.seeds):
        for heads in (0, options.heads):
            own = ImitationOptions(options.layer, **(COMPARED | {"attention_heads": heads}))  # type: ignore[arg-type]
            loop = LoopOptions(options.steps, options.batch_size, seed=seed)
            run = options.work / "runs" / f"attention-n{options.layer}-{heads}-{options.steps}-{seed}"
            cache = options.work / "features"
            draft = train_draft(target, told.captions, own, loop, run, told.validation, cache)
            assert isinstance(draft, ImitationDraft)
            (result,) = evaluate_drafts(target, told.heldout, [str(run)]).values()
            line = {
                "attention_heads": heads,
                "seed": seed,
                "flops": draft.network.config.flops,
                **{name: round(result.to_dict()[name], 5) for name in FIGURES},
            }
            print(line)
            lines.append(line)
    result = {
        "script": "benchmarks/papers_fastvlm_attention.py",
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "layer": options.layer,
        "steps": options.steps,
        "records_per_step": options.batch_size,
        "captions": len(told.captions),
        "heldout": len(told.heldout),
        "drafts": lines,
    }
    print(save(f"papers-fastvlm-attention-{MODEL}", result, "torch", "transformers"))


if __name__ == "__main__":
    main()
