"""Makes ``tiny-blip2-flant5`` from nothing: ``python -m vlmexport.calibration.workshop.recipes.tiny_blip2_flant5 --out DIR``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from .....runtime.measure.machine import cores
from ...precision import PRECISIONS
from .decoder_stage import train_decoder
from .evaluate import evaluate_folder
from .report import write_recipe
from .vision_stage import train_vision


def main() -> None:
    """Runs, or after an interruption continues, both stages and the evaluation."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m vlmexport.calibration.workshop.recipes.tiny_blip2_flant5"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the model (out/model), data and checkpoints"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pictures", type=int, default=64_000, help="training pictures; each is also used mirrored"
    )
    parser.add_argument("--vision-steps", type=int, default=1450)
    parser.add_argument("--decoder-steps", type=int, default=2000)
    parser.add_argument(
        "--joint-steps", type=int, default=0, help="how many of the last decoder steps train all"
    )
    parser.add_argument("--scenes", type=int, default=1000, help="held-out scenes of the evaluation")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="auto: bf16 where the processor has units for it",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out / "model"
    train_vision(
        options.out,
        options.vision_steps,
        size=options.pictures,
        seed=options.seed,
        precision=options.precision,
    )
    train_decoder(
        options.out,
        options.decoder_steps,
        folder,
        size=options.pictures,
        joint=options.joint_steps,
        seed=options.seed,
        precision=options.precision,
    )
    write_recipe(options.out, folder, {name: value for name, value in vars(options).items() if name != "out"})
    result = evaluate_folder(folder, options.scenes, options.seed)
    (options.out / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
