"""What the model is asked for a caption."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vlmexport.calibration.data.scenes.asking import DESCRIBE, Asked

USUAL = 0.6  # share of the first prompt
UPPER = 0.3  # of questions that begin with a capital letter

PROMPTS = (
    DESCRIBE,
    "Describe the scene",
    "describe the scene.",
    "Describe the scene.",
    "please describe the scene",
    "describe the picture",
    "Describe the image.",
    "what do you see?",
    "What is on the table?",
    "",
)


def drawn(prompts: Sequence[str], rng: np.random.Generator) -> str:
    """One of them, most often the first."""
    return prompts[0] if rng.random() < USUAL else prompts[int(rng.integers(len(prompts)))]


def questions(asked: Sequence[Asked], rng: np.random.Generator) -> list[str]:
    """Their texts, some with a capital letter."""
    upper = rng.random(len(asked)) < UPPER
    return [item.text.capitalize() if up else item.text for item, up in zip(asked, upper, strict=True)]
