"""What attention over exit rows gives an imitation network (FastVLM, appendix B) of tiny-blip2-flant5, at equal steps.

    python benchmarks/papers_fastvlm_attention.py --work runs/drafts

Trains a network without attention and one with for as many steps on the same answers, with the settings of the shipped drafts
(calibration/workshop/recipes/tiny_drafts.py, whose folder --work may be), and counts what each would have accepted of
held-out captions. Counts only, no clock. Writes results/papers-fastvlm-attention-tiny-blip2-flant5.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from machine import save
from vlmexport.calibration.data import load_records
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.training.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.training.options import LoopOptions
from vlmexport.calibration.training.run import train_draft
from vlmexport.calibration.workshop.recipes.tiny_drafts import CAPTIONS, HELDOUT, MODEL, STEPS, prepare
from vlmexport.calibration.workshop.recipes.workshop import SHIPPED
from vlmexport.exporter.drafts.imitation import ImitationDraft

FIGURES = ("alpha", "tau", "agreement", "overlap", "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--captions", type=int, default=CAPTIONS)
    parser.add_argument("--heldout", type=int, default=HELDOUT)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = prepare(MODEL, options.work, options.captions, options.heldout).target
    place = options.work / target.fingerprint.removeprefix("sha256:")[:12]
    told = {name: load_records(str(place / name)) for name in ("captions", "validation", "heldout")}
    found = []
    for seed in range(options.seeds):
        for heads in (0, options.heads):
            own = ImitationOptions(options.layer, attention_heads=heads, **SHIPPED)  # type: ignore[arg-type]
            loop = LoopOptions(options.steps, options.batch_size, seed=seed)
            run = options.work / "runs" / f"attention-n{options.layer}-{heads}-{options.steps}-{seed}"
            cache = options.work / "features"
            draft = train_draft(target, told["captions"], own, loop, run, told["validation"], cache)
            assert isinstance(draft, ImitationDraft)
            (result,) = evaluate_drafts(target, told["heldout"], [str(run)]).values()
            line = {
                "attention_heads": heads,
                "seed": seed,
                "flops": draft.network.config.flops,
                **{name: round(result.to_dict()[name], 5) for name in FIGURES},
            }
            print(line)
            found.append(line)
    result = {
        "script": "benchmarks/papers_fastvlm_attention.py",
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "layer": options.layer,
        "steps": options.steps,
        "records_per_step": options.batch_size,
        "captions": len(told["captions"]),
        "heldout": len(told["heldout"]),
        "drafts": found,
    }
    print(save(f"papers-fastvlm-attention-{MODEL}", result, "torch", "transformers"))


if __name__ == "__main__":
    main()
