"""Makes ``smollm2-llava``, or continues it after a stop: vision stage, projector, language model, record, evaluation.

    python -m benchmarks.smollm2 runs/smollm2
    python -m recipes.smollm2_llava --language runs/smollm2

State, log and model lie in the user's cache folder unless `--out` names another. SIGTERM or Ctrl-C ends the run after
the step that is under way, with its state saved; SIGSTOP and SIGCONT pause it. The same command continues, also on another
kind of device. Steps, batches and layers are meant for a GPU; all stages run where ``--device`` says.
"""

from __future__ import annotations

from pathlib import Path

from ..common.command import device_options, finish, is_stopped, parsed, recipe_parser
from ..common.optimizer import OPTIMIZERS
from .captioner import SmolLlava
from .model import build_model
from .projector import fit_projector
from .tokenizer import build_tokenizer
from .train import LEARNING_RATE, TUNED, train
from .vision_stage import PROJECTOR, pictures_of, train_vision

NAME = "smollm2-llava"
STEPS, VISION_STEPS = 1500, 1500


def main() -> None:
    """Command line of the recipe."""
    parser = recipe_parser(__doc__, NAME, STEPS)
    parser.add_argument(
        "--language", type=Path, required=True, help="folder of SmolLM2-135M-Instruct, or of another Llama"
    )
    parser.add_argument("--vision-steps", type=int, default=VISION_STEPS)
    parser.add_argument("--vision-batch", type=int, default=256, help="pictures of a step")
    parser.add_argument("--questions", type=int, default=128, help="of a step")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="of the language model")
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="muon",
        help="of the language model's matrices; Muon's own work is that of a batch of hundreds of texts: adamw for the small "
        "batches that a CPU allows",
    )
    parser.add_argument(
        "--tuned",
        type=int,
        default=TUNED,
        help="last layers of the language model that learn; with all of them, the projector, too",
    )
    parser.add_argument("--checked", type=int, default=64, help="validation scenes of a check of texts")
    device_options(parser)
    parser.set_defaults(pictures=48_000, check_every=750)
    options = parsed(parser)
    tokenizer = build_tokenizer(options.language)
    model, seen = build_model(options.language, tokenizer, options.seed), options.out / "vision"
    reached = train_vision(
        options.out,
        model,
        options.vision_steps,
        size=options.pictures,
        batch=options.vision_batch,
        seed=options.seed,
        precision=options.precision,
        device=options.device,
        workers=options.workers,
    )
    if is_stopped(reached, options.vision_steps, "the vision stage"):
        return
    if not (seen / PROJECTOR).exists():
        shown = pictures_of(options.out, options.seed, options.pictures)
        model.to(options.device)
        missed = fit_projector(model, tokenizer, seen / PROJECTOR, options.seed, shown)
        print(f"the projector misses {missed:.3f} of the words' spread")
    del model
    reached = train(
        options.out,
        options.steps,
        options.language,
        tuned=options.tuned,
        pictures=options.pictures,
        captions=options.captions,
        questions=options.questions,
        lr=options.lr,
        optimizer=options.optimizer,
        seed=options.seed,
        precision=options.precision,
        stop_at=options.stop_at,
        check_every=options.check_every,
        checked=options.checked,
        device=options.device,
        workers=options.workers,
    )
    finish(options, reached, SmolLlava, "python -m recipes.smollm2_llava")


if __name__ == "__main__":
    main()
