"""Makes ``tiny-vit-gpt2``, or continues it after a stop: rows of the image tower, decoder, record, evaluation.

    python -m recipes.tiny_vit_gpt2

State, log and model lie in the user's cache folder unless `--out` names another. SIGTERM or Ctrl-C ends the run after
the step that is under way, with its state saved; SIGSTOP and SIGCONT pause it. The same command continues.
"""

from __future__ import annotations

from pathlib import Path

from vlmexport.exporter.common.tiny_models import tiny_model

from ..common.command import finish, parsed, recipe_parser
from .captioner import ViTGPT2
from .train import train

NAME = "tiny-vit-gpt2"
STEPS = 1800


def main() -> None:
    """Command line of the recipe."""
    parser = recipe_parser(__doc__, NAME, STEPS)
    parser.add_argument(
        "--tower",
        type=Path,
        default=tiny_model("tiny-blip2-flant5"),
        help="folder of a trained tiny-blip2-flant5 whose image tower is taken; default: that of vlmexport-tiny-models",
    )
    options = parsed(parser)
    reached = train(
        options.out,
        options.steps,
        options.tower,
        pictures=options.pictures,
        captions=options.captions,
        seed=options.seed,
        precision=options.precision,
        stop_at=options.stop_at,
    )
    command = "python -m recipes.tiny_vit_gpt2"
    finish(options, reached, ViTGPT2, command)


if __name__ == "__main__":
    main()
