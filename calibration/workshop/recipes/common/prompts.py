"""What the model is asked for a caption."""

from __future__ import annotations

from ...scenes.asking import DESCRIBE

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
