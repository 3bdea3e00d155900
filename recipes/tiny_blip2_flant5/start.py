"""What a training keeps of a trained model: the vision side as it is, projection, encoder and embeddings as a beginning."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Blip2ForConditionalGeneration, PreTrainedTokenizerBase

from ..common.folder import digest
from ..common.words import STEM
from .model import FROZEN, build_model

_BEGUN = ("language_projection.", "language_model.encoder.block.", "language_model.encoder.final_layer_norm.")


def begin(
    tokenizer: PreTrainedTokenizerBase, seed: int, start: Path | None, vision: Path | None = None
) -> tuple[Blip2ForConditionalGeneration, str]:
    """A model with a fresh decoder, and a name for what it was begun with.

    Args:
        start: folder of a trained model of this architecture: its vision side, projection and encoder are copied, and
            the embeddings of the words that both tokenizers have.
        vision: instead, the state of `vision_stage.train_vision`: the vision side alone is copied.
    """
    model = build_model(tokenizer, seed)
    if start is None:
        assert vision is not None
        weights = torch.load(vision, weights_only=True, map_location="cpu")["model"]
        model.load_state_dict(weights, strict=False)
        return model.eval(), digest(vision)
    old = Blip2ForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
    kept = {k: v for k, v in old.state_dict().items() if k.startswith((*FROZEN, *_BEGUN))}
    model.load_state_dict(kept, strict=False)
    before, after = AutoTokenizer.from_pretrained(start).get_vocab(), tokenizer.get_vocab()
    common = [(before[w], after[w]) for w in after if w in before and w.startswith(STEM)]
    with torch.no_grad():
        table = model.language_model.shared.weight
        table[[new for _, new in common]] = old.language_model.shared.weight[[known for known, _ in common]]
    return model.eval(), digest(start / "model.safetensors")
