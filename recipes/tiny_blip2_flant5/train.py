"""The training of the language model: the vision side frozen, texts drawn anew for every step, no deep supervision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.decoder_stage import DecoderStage
from ..common.prompts import PROMPTS
from .captioner import Blip2T5
from .model import FROZEN, save_bundle
from .start import begin
from .tokenizer import build_tokenizer


def train(out: Path, steps: int, start: Path | None, **options: Any) -> int:
    """Runs or continues the training; see `DecoderStage.train`.

    Args:
        start: see `start.begin`; None takes ``out/vision/state.pt``, which the vision stage writes.
        options: further ones of `DecoderStage`.
    """
    stage, tokenizer = DecoderStage(steps, **options), build_tokenizer()
    model, begun = begin(tokenizer, stage.seed, start, out / "vision" / "state.pt")
    return stage.train(out, Blip2T5(model, tokenizer), FROZEN, {"start": begun}, save_bundle, PROMPTS)
