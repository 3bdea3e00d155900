"""Makes ``tiny-qwen2.5-vl``, or continues it after a stop: vision stage, rows, language model, its last stage with layer
dropout, the mean of both, record, evaluation.

    python -m recipes.tiny_qwen2_5_vl

States, logs and models (the finished one in ``final``) lie in the user's cache folder unless `--out` names another. SIGTERM or Ctrl-C ends the run after
the step that is under way, with its state saved; SIGSTOP and SIGCONT pause it. The same command continues, also on another
kind of device. The vision stage and the rows are computed on the CPU, the language model where ``--device`` says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vlmexport.exporter.common.tiny_models import tiny_model

from ..common.command import device_options, finish, is_stopped, parsed, recipe_parser
from .average import save_mean
from .captioner import Qwen25VL
from .teacher import Teacher
from .train import LanguageStage
from .vision_stage import train_vision

NAME = "tiny-qwen2.5-vl"
STEPS, VISION_STEPS, LAST_STEPS = 2000, 2000, 160
LAST_LR = 1.5e-3
LAST = "last"


def main() -> None:
    """Command line of the recipe."""
    parser = recipe_parser(__doc__, NAME, STEPS)
    parser.set_defaults(pictures=32_000, captions=32)
    parser.add_argument("--vision-steps", type=int, default=VISION_STEPS)
    parser.add_argument("--last-steps", type=int, default=LAST_STEPS)
    parser.add_argument(
        "--vision-scenes", type=int, default=64_000, help="training scenes of the vision stage"
    )
    parser.add_argument(
        "--teacher",
        type=Path,
        default=tiny_model("tiny-vit-gpt2"),
        help="folder of a trained tiny-vit-gpt2 whose tower teaches this one; default: that of vlmexport-tiny-models",
    )
    parser.add_argument("--pairs", type=int, default=8_000, help="pairs of pictures that are rendered")
    parser.add_argument("--films", type=int, default=12_000, help="films that are rendered")
    parser.add_argument("--step-pairs", type=int, default=8, help="of a step")
    parser.add_argument("--step-films", type=int, default=12, help="of a step")
    device_options(parser)
    options = parsed(parser)
    if options.last_steps < 1:
        parser.error(
            f"--last-steps {options.last_steps}: at least 1; the model is the mean of before and after"
        )
    teacher = Teacher(options.teacher, options.seed)
    reached = train_vision(
        options.out,
        options.vision_steps,
        options.vision_scenes,
        teacher,
        seed=options.seed,
        precision=options.precision,
    )
    if is_stopped(reached, options.vision_steps, "the vision stage"):
        return
    stage = LanguageStage(
        options.steps,
        pictures=options.pictures,
        pairs=options.pairs,
        films=options.films,
        sizes=(options.captions, options.step_pairs, options.step_films),
        seed=options.seed,
        precision=options.precision,
        stop_at=options.stop_at,
        check_every=options.check_every,
        device=options.device,
        workers=options.workers,
    )
    data, vision = options.out / "data", options.out / "vision" / "state.pt"
    reached = stage.train(options.out, data, vision, teacher)
    command = "python -m recipes.tiny_qwen2_5_vl"
    if reached < options.steps:
        finish(options, reached, Qwen25VL, command)
        return
    last = replace(stage, steps=options.last_steps, lr=LAST_LR, start=options.out / "state.pt", stop_at=None)
    place = options.out / LAST
    if last.train(place, data, vision, teacher) < options.last_steps:
        print("the last stage was stopped; the same command continues")
        return
    folder = options.out / "final"
    save_mean(options.out / "state.pt", place / "state.pt", vision, teacher, folder)
    finish(options, reached, Qwen25VL, command, folder)


if __name__ == "__main__":
    main()
