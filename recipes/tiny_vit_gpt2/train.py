"""The training of the decoder: the image tower frozen, captions drawn anew for every step, no deep supervision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ..common.decoder_stage import DecoderStage
from .captioner import ViTGPT2
from .model import FROZEN, build_model, save_bundle
from .tokenizer import build_tokenizer
from .tower import take_tower


def train(out: Path, steps: int, tower: Path, **options: Any) -> int:
    """Runs or continues the training; see `DecoderStage.train`.

    Args:
        tower: folder of a trained `tiny-blip2-flant5`, whose image tower is taken.
        options: further ones of `DecoderStage`.
    """
    stage, tokenizer = DecoderStage(steps, **options), build_tokenizer()
    model = build_model(tokenizer, stage.seed).eval()
    begun = take_tower(model, tower)
    captioner = ViTGPT2(model, tokenizer)
    blocks: Any = captioner.layers
    for block in blocks:  # GPT-2's gelu_new as one operator: an eighth of a step's time
        block.mlp.act = nn.GELU(approximate="tanh")
    return stage.train(out, captioner, FROZEN, {"tower": begun}, save_bundle)
