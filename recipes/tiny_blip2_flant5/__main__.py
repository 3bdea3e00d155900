"""Makes ``tiny-blip2-flant5``, or continues it after a stop: vision stage, language model, record, evaluation.

    python -m recipes.tiny_blip2_flant5

State, log and model lie in the user's cache folder unless `--out` names another. SIGTERM or Ctrl-C ends the run after
the step that is under way, with its state saved; SIGSTOP and SIGCONT pause it. The same command continues.
"""

from __future__ import annotations

from pathlib import Path

from ..common.command import finish, is_stopped, parsed, recipe_parser
from .captioner import Blip2T5
from .train import train
from .vision_stage import train_vision

NAME = "tiny-blip2-flant5"
STEPS = 3000


def main() -> None:
    """Command line of the recipe."""
    parser = recipe_parser(__doc__, NAME, STEPS)
    parser.add_argument(
        "--start",
        default="none",
        help="folder of a model whose vision side is kept and whose encoder is a beginning; none (default): train the "
        "vision side first and begin the encoder from nothing",
    )
    parser.add_argument("--vision-steps", type=int, default=1450, help="with --start none")
    parser.add_argument("--questions", type=int, default=64, help="of a step")
    options = parsed(parser)
    start = None if options.start == "none" else Path(options.start)
    if start is None:
        reached = train_vision(
            options.out,
            options.vision_steps,
            size=options.pictures,
            seed=options.seed,
            precision=options.precision,
        )
        if is_stopped(reached, options.vision_steps, "the vision stage"):
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
    command = "python -m recipes.tiny_blip2_flant5"
    finish(options, reached, Blip2T5, command)


if __name__ == "__main__":
    main()
