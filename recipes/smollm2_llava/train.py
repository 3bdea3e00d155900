"""The training of the language model: the tower frozen, texts drawn anew for every step, no deep supervision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.decoder_stage import DecoderStage
from ..common.folder import digest
from ..common.prompts import PROMPTS
from .captioner import SmolLlava
from .model import build_model, frozen, save_bundle
from .tokenizer import build_tokenizer
from .vision_stage import pictures_of, take_vision

LEARNING_RATE = 1e-3
TUNED = 30
"""Last layers that learn: all of SmolLM2's."""


def train(out: Path, steps: int, language: Path, tuned: int = TUNED, **options: Any) -> int:
    """Runs or continues the training; see `DecoderStage.train`.

    Args:
        out: also has ``vision`` with what the vision stage and `fit_projector` wrote. language: folder of a Llama.
        tuned: see `model.frozen`. options: further ones of `DecoderStage`.
    """
    options = {"lr": LEARNING_RATE, "answers": 1.0} | options
    stage = DecoderStage(steps, **options)
    tokenizer = build_tokenizer(language)
    model = build_model(language, tokenizer, stage.seed).eval()
    take_vision(model, out / "vision")
    begun = {
        "vision": digest(out / "vision" / "state.pt"),
        "language": "-".join(map(digest, sorted(language.glob("*.safetensors")))),
        "tuned": tuned,
    }
    shown = pictures_of(out, stage.seed, stage.pictures)
    return stage.train(
        out, SmolLlava(model, tokenizer), frozen(model, tuned), begun, save_bundle, PROMPTS, shown
    )
