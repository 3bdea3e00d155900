"""The model that the recipe gives: the mean of the parameters before the last stage and after it.

With layer dropout the early layers say more and the whole decoder a little less. Between both sets of parameters each changes
smoothly and nothing breaks, as Wortsman et al. found for fine-tuned models (arXiv:2109.01903, section 3): the mean keeps most of
what either is good at.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..common.captioner import LONGEST
from .model import build_model, save_bundle
from .teacher import Teacher
from .tokenizer import build_tokenizer
from .train import take_tower


def save_mean(before: Path, after: Path, vision: Path, teacher: Teacher, folder: Path) -> None:
    """Writes the model's folder from the states of two trainings of the language model and of the vision stage."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).eval()
    take_tower(model, vision, teacher)
    one, two = (torch.load(path, weights_only=True, map_location="cpu")["model"] for path in (before, after))
    model.load_state_dict({name: (value + two[name]) / 2 for name, value in one.items()}, strict=False)
    save_bundle(model, tokenizer, folder, LONGEST)
