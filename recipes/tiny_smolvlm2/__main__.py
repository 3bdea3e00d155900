"""Makes ``tiny-smolvlm2``, or continues it after a stop: vision stage, rows, language model, record, evaluation.

    python -m recipes.tiny_smolvlm2

State, log and model lie in the user's cache folder unless `--out` names another. SIGTERM or Ctrl-C ends the run after
the step that is under way, with its state saved; SIGSTOP and SIGCONT pause it. The same command continues, also on another
kind of device. Both stages run where ``--device`` says.
"""

from __future__ import annotations

from ..common.command import device_options, finish, is_stopped, parsed, recipe_parser
from .captioner import SmolVLM2
from .train import TilesStage, train
from .vision_stage import train_vision

NAME = "tiny-smolvlm2"
STEPS, VISION_STEPS = 2400, 2000


def main() -> None:
    """Command line of the recipe."""
    parser = recipe_parser(__doc__, NAME, STEPS)
    parser.add_argument("--vision-steps", type=int, default=VISION_STEPS)
    parser.add_argument(
        "--vision-pictures",
        type=int,
        help="training scenes of the vision stage; default: those of --pictures",
    )
    parser.add_argument("--vision-batch", type=int, default=128, help="pictures of a step")
    parser.add_argument(
        "--checked", type=int, default=TilesStage.checked, help="validation scenes of a check of texts"
    )
    device_options(parser)
    parser.set_defaults(captions=TilesStage.captions)
    options = parsed(parser)
    reached = train_vision(
        options.out,
        options.vision_steps,
        size=options.vision_pictures or options.pictures,
        batch=options.vision_batch,
        seed=options.seed,
        precision=options.precision,
        device=options.device,
        workers=options.workers,
    )
    if is_stopped(reached, options.vision_steps, "the vision stage"):
        return
    reached = train(
        options.out,
        options.steps,
        pictures=options.pictures,
        captions=options.captions,
        seed=options.seed,
        precision=options.precision,
        stop_at=options.stop_at,
        check_every=options.check_every,
        checked=options.checked,
        device=options.device,
        workers=options.workers,
    )
    finish(options, reached, SmolVLM2, "python -m recipes.tiny_smolvlm2")


if __name__ == "__main__":
    main()
