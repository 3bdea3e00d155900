"""What the commands of the recipes have in common: options, and what follows the last step."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from vlmexport.runtime.common.cpu_count import cores

from ..precision import DEVICES, PRECISIONS, device_of
from .captioner import Captioner
from .carry import begin_with
from .evaluation import evaluate, report
from .long_run import recipe_folder
from .record import write_recipe


def recipe_parser(description: str | None, name: str, steps: int) -> argparse.ArgumentParser:
    """A parser with the options that every recipe has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=recipe_folder(name), help="default: %(default)s")
    parser.add_argument(
        "--begin-with", type=Path, metavar="FOLDER", help="a state of another machine, packed by common.carry"
    )
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--scenes", type=int, default=1000, help="held-out scenes of the evaluation; 0: none")
    parser.add_argument("--stop-at", type=int, help="end after so many steps of the schedule")
    parser.add_argument(
        "--pictures", type=int, default=64_000, help="training scenes; each is also used mirrored"
    )
    parser.add_argument("--captions", type=int, default=64, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="auto: bf16 where the processor has units for it",
    )
    return parser


def device_options(parser: argparse.ArgumentParser) -> None:
    """The options of a recipe that can run on a GPU."""
    parser.add_argument("--check-every", type=int, default=250, help="steps between two checks")
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="auto: a GPU where PyTorch finds one"
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that make rows and, for a GPU, draw texts; default: one per core for a GPU, else none but this",
    )


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, once what they say about the whole process is done: a carried state, threads, the
    device."""
    options = parser.parse_args()
    if options.begin_with is not None:
        begin_with(options.begin_with, options.out)
    torch.set_num_threads(options.threads)
    if "device" in options:
        options.device = device_of(options.device)
        if options.device == "cuda":  # where float32 is asked for
            torch.set_float32_matmul_precision("high")
        if options.workers is None:
            options.workers = cores() if options.device == "cuda" else 1
    return options


def is_stopped(reached: int, steps: int, stage: str) -> bool:
    """Whether a stage before the last was stopped before its end; that is said."""
    if reached < steps:
        print(f"{reached} of {steps} steps of {stage}; the same command continues")
    return reached < steps


def finish(
    options: argparse.Namespace,
    reached: int,
    kind: type[Captioner],
    command: str,
    place: Path | None = None,
) -> None:
    """Says how far the training is; after the last step writes the record and the evaluation of the model in `place`, by
    default ``model`` in `--out`."""
    folder: Path = place or options.out / "model"
    print(f"{reached} of {options.steps} steps; model in {folder}")
    if reached == options.steps:
        settings = {
            k: v.name if isinstance(v, Path) else v
            for k, v in vars(options).items()
            if k not in {"out", "begin_with"}
        }
        write_recipe(options.out, folder, settings, command)
        if options.scenes:
            captioner = kind.open(folder, options.device if "device" in options else "cpu")
            report(evaluate(captioner, folder, options.scenes), options.out / "evaluation.json")
