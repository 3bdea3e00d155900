"""Acceptance of short trainings by their learning rate, at two widths: what the default rates of `vlmexport train` rest on.

    python -m recipes.tiny_drafts --work runs/drafts --out runs/drafts/out
    python -m benchmarks.learning_rates --work runs/drafts

    python -m recipes.smollm2_draft --model runs/smollm2 --work runs/smollm2-draft --out runs/smollm2-n10
    python -m benchmarks.learning_rates --smollm2 runs/smollm2 --work runs/smollm2-draft --steps 100 \\
      --drafts medusa --rates 1e-3 3e-3 7e-3 1e-2 3e-2

    python -m benchmarks.learning_rates --model tiny-qwen2.5-vl --work runs/drafts --captions 2048 --drafts eagle vispec --steps 200

Drafts with the defaults of `train` (but for SmolLM2's three Medusa heads of 4,096 tokens; ViSpec in its two stages, half of the steps
each) learn from the target's own answers at every rate, and are measured on held-out ones, layers on the first 150 of them. Layers
read 32 texts a step. Finished trainings are reread. No clock. Writes results/learning-rates-MODEL.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation.acceptance import Acceptance
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.objectives import options_of
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.runtime.common.errors import DivergedError

from benchmarks.machine import save
from recipes.layer_stages import LAYERS, train_in_stages, whole_answers
from recipes.smollm2_draft import reopen
from recipes.tiny_drafts import CAPTIONS, HEADS, HELDOUT, MODEL, prepare
from recipes.workshop import DRAFT_LENGTH, Workshop

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
KINDS = ("imitation", "medusa", *LAYERS)
SHOWN, OF_WHAT = ("alpha", "tau", "overlap"), ("draft_length", "tokens")
"""Figures of an acceptance, and what they are of; null for a training whose loss is not finite."""
TEXTS, LAYER_HELDOUT = 32, 150
TRIMMED = MedusaOptions(heads=3, head="trimmed", head_vocabulary=4096)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--smollm2", help="the checkpoint of a finished smollm2_draft recipe")
    parser.add_argument("--model", default=MODEL, help="without --smollm2: a target of tabletop scenes")
    parser.add_argument("--drafts", nargs="+", choices=KINDS, default=KINDS[:2])
    parser.add_argument("--captions", type=int, default=CAPTIONS)
    parser.add_argument("--heldout", type=int, default=HELDOUT)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.smollm2:
        workshop, name, heads = reopen(options.smollm2, options.work), "smollm2-135m", TRIMMED
    else:
        workshop = prepare(options.model, options.work, options.captions, options.heldout)
        name, heads = options.model, HEADS
    layer = min(workshop.features)
    rows = []
    for draft in options.drafts:
        for rate in options.rates:
            acceptances: list[Acceptance | None] = []
            batch = TEXTS if draft in LAYERS else workshop.batch
            for seed in range(options.seeds):
                run = f"rates-{workshop.target.fingerprint[7:19]}-{draft}-{rate:g}-{seed}-{options.steps}"
                place = options.work / "runs" / run
                loop = LoopOptions(options.steps, batch, rate, seed=seed)
                try:
                    if draft in LAYERS:
                        acceptances.append(of_layer(workshop, draft, loop, place, options.work / "features"))
                    else:
                        kind = ImitationOptions(layer) if draft == "imitation" else heads
                        acceptances.append(of_rows(workshop, kind, loop, place))
                except DivergedError as error:
                    print(error)
                    acceptances.append(None)
            rows.append(
                {
                    "draft": f"imitation@{layer}" if draft == "imitation" else draft,
                    "rate": rate,
                    "records_per_step": batch,
                    **{
                        name: [each and round(getattr(each, name), 4) for each in acceptances]
                        for name in SHOWN
                    },
                    **{name: [each and getattr(each, name) for each in acceptances] for name in OF_WHAT},
                }
            )
            print("|", " | ".join(str(value) for value in rows[-1].values()), "|", flush=True)
    target = workshop.target
    result = {
        "script": "benchmarks/learning_rates.py",
        "model": {"name": target.name, "fingerprint": target.fingerprint, "width": target.hidden_size},
        "train_records": len(workshop.features[layer].train),
        "steps": options.steps, "seeds": options.seeds, "rows": rows,
    }  # fmt: skip
    print(save(f"learning-rates-{name}", result, "torch", "transformers"))


def of_rows(
    workshop: Workshop, kind: ImitationOptions | MedusaOptions, loop: LoopOptions, out: Path
) -> Acceptance:
    """Greedy acceptance on held-out answers of what learns from single rows."""
    if isinstance(kind, ImitationOptions):
        return workshop.heldout(kind.layer, workshop.train(kind, loop, out).network)
    return workshop.heldout_heads(workshop.train(kind, loop, out))


def of_layer(workshop: Workshop, draft: str, loop: LoopOptions, out: Path, cache: Path) -> Acceptance:
    """Greedy acceptance on held-out answers of a layer, which learns from whole texts."""
    answers = whole_answers(workshop)
    texts = answers.train, answers.validation
    train_in_stages(options_of(draft).of({}), loop, workshop.target, texts, out, cache, validations=1)
    held = RecordSet(answers.heldout.name, list(answers.heldout)[:LAYER_HELDOUT])
    (acceptance,) = evaluate_drafts(workshop.target, held, [str(out)], DRAFT_LENGTH).values()
    return acceptance


if __name__ == "__main__":
    main()
