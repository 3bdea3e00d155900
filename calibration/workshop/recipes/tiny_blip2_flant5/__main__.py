"""Makes ``tiny-blip2-flant5``, or continues it after a stop: vision stage, language model, record, evaluation.

    python -m vlmexport.calibration.workshop.recipes.tiny_blip2_flant5

State, log and model lie in the user's cache folder unless `--out` names another. SIGTERM or Ctrl-C ends the run after
the step that is under way, with its state saved; SIGSTOP and SIGCONT pause it. The same command continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .....runtime.cores import cores
from ...precision import PRECISIONS
from ..long_run import recipe_folder
from .evaluate import evaluate_folder, report
from .record import write_recipe
from .train import train
from .vision_stage import train_vision

NAME = "tiny-blip2-flant5"
STEPS = 3000


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=recipe_folder(NAME), help="default: %(default)s")
    parser.add_argument(
        "--start",
        default="none",
        help="folder of a model whose vision side is kept and whose encoder is a beginning; none (default): train the "
        "vision side first and begin the encoder from nothing",
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--vision-steps", type=int, default=1450, help="with --start none")
    parser.add_argument("--scenes", type=int, default=1000, help="held-out scenes of the evaluation")
    parser.add_argument("--stop-at", type=int, help="end after so many steps of the schedule")
    parser.add_argument(
        "--pictures", type=int, default=64_000, help="training scenes; each is also used mirrored"
    )
    parser.add_argument("--captions", type=int, default=64, help="of a step")
    parser.add_argument("--questions", type=int, default=64, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="auto: bf16 where the processor has units for it",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = None if options.start == "none" else Path(options.start)
    if start is None:
        reached = train_vision(
            options.out,
            options.vision_steps,
            size=options.pictures,
            seed=options.seed,
            precision=options.precision,
        )
        if reached < options.vision_steps:
            print(
                f"{reached} of {options.vision_steps} steps of the vision stage; the same command continues"
            )
            return
    reached = train(
        options.out,
        options.steps,
        start,
        pictures=options.pictures,
        captions=options.captions,
        questions=options.questions,
        seed=options.seed,
        precision=options.precision,
        stop_at=options.stop_at,
    )
    print(f"{reached} of {options.steps} steps; model in {options.out / 'model'}")
    if reached == options.steps:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k != "out"}
        write_recipe(options.out, options.out / "model", settings)
        report(evaluate_folder(options.out / "model", options.scenes), options.out / "evaluation.json")


if __name__ == "__main__":
    main()
