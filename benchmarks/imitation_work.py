"""What the scripts have in common that train imitation networks in the folder of the recipe of the shipped drafts
(recipes/tiny_drafts.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from recipes.tiny_drafts import CAPTIONS, HELDOUT, MODEL, prepare
from recipes.workshop import Answers, Workshop


def work_parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """The options that they share; `steps` by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--captions", type=int, default=CAPTIONS)
    parser.add_argument("--heldout", type=int, default=HELDOUT)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def prepared(options: argparse.Namespace) -> tuple[Workshop, Answers]:
    """The target with its answers, in the folder `--work`."""
    torch.set_num_threads(options.threads)
    workshop = prepare(MODEL, options.work, options.captions, options.heldout)
    assert workshop.answers is not None
    return workshop, workshop.answers
