"""The training of the language model: the tower and the connector frozen, texts drawn anew for every step, no deep supervision.

All texts about a picture share its rows in one sequence. The first third of the steps learns captions and roll calls alone; questions
build on what is learned there. A fourth as many pictures are shown whole in one tile, as a processor shows them that does
not split: so the model answers that way, too, as well as 32 pixels let it, and what the tiles add can be measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vlmexport.calibration.data.scenes.scene import VALIDATION

from ..common.attention import use_dense_attention
from ..common.captioner import Captioner
from ..common.decoder_stage import DecoderStage
from ..common.emphasis import ALONE, emphasis, seen_ids
from ..common.folder import digest
from ..common.loop import Part
from ..common.packed_batches import QUESTIONS, Batch, PictureBatches
from ..common.packed_loss import part_of
from ..common.prompts import PROMPTS
from ..precision import computing, dtype_of
from .captioner import SmolVLM2
from .checks import TileChecks
from .model import FROZEN, build_model, save_bundle
from .tiles import TILED, WHOLE
from .tokenizer import build_tokenizer
from .vision_stage import pictures_of, take_vision

PASSES = 2
"""Forward passes that a step's pictures are split into: the activations of one must fit beside the rest into 3 GB."""
WHOLE_SHARE = 4
"""To so many pictures in tiles there is one that is shown whole; their losses weigh accordingly."""


@dataclass(frozen=True)
class TilesStage(DecoderStage):
    """The settings; `captions` are a step's pictures in tiles, `questions` those about each picture."""

    captions: int = 32
    questions: int = QUESTIONS

    def texts(self, captioner: Captioner, prompts: Sequence[str]) -> TiledTexts:
        """See `DecoderStage`."""
        assert isinstance(captioner, SmolVLM2)
        return TiledTexts(self, captioner)


class TiledTexts:
    """Packed texts about pictures in tiles and about whole ones; see `Texts`."""

    def __init__(self, stage: TilesStage, captioner: SmolVLM2) -> None:
        self.stage, self.captioner = stage, captioner
        sizes = [max(1, stage.captions // PASSES)] * PASSES + [max(1, stage.captions // WHOLE_SHARE)]
        self.batches = [PictureBatches(captioner, stage.seed, stage.pictures, size) for size in sizes]
        self.checks = TileChecks(captioner, stage.seed, VALIDATION[: stage.checked])
        self.seen = seen_ids(captioner.tokenizer).to(captioner.device)

    def asked(self, step: int) -> bool:
        """Whether questions are learned in a step."""
        return step >= int(ALONE * self.stage.steps)

    def draw(self, step: int) -> list[Batch]:
        """See `Texts`; the last batch is of whole pictures."""
        first, last = len(self.batches) * step, len(self.batches) - 1
        return [
            batches.of_pictures(first + turn, WHOLE if turn == last else TILED, self.asked(step))
            for turn, batches in enumerate(self.batches)
        ]

    def losses(self, step: int, drawn: list[Batch], stored: np.ndarray) -> Iterator[Part]:
        """See `Texts`."""
        dtype = dtype_of(self.stage.precision, self.stage.device)
        weight = emphasis(step, self.stage.steps)
        names = ("caption", "answer" if self.asked(step) else "", "roll_call")
        for batch in drawn:
            with computing(dtype, self.stage.device):
                part = part_of(self.captioner, batch, stored, names, self.seen, weight)
            if batch.media == WHOLE:
                yield {f"whole_{name}": (share / WHOLE_SHARE, value) for name, (share, value) in part.items()}
            else:
                yield {name: (share, value / PASSES) for name, (share, value) in part.items()}

    def figures(self) -> dict[str, Any]:
        """See `Texts`: what the tiles show."""
        return self.checks.figures()


def train(out: Path, steps: int, **options: Any) -> int:
    """Runs or continues the training; see `DecoderStage.train`.

    Args:
        out: also has ``vision`` with what the vision stage wrote. options: further ones of `TilesStage`.
    """
    stage, tokenizer, vision = TilesStage(steps, **options), build_tokenizer(), out / "vision" / "state.pt"
    model = build_model(tokenizer, stage.seed).eval()
    take_vision(model, vision)
    captioner = SmolVLM2(model, tokenizer)
    use_dense_attention(captioner.language)
    shown = pictures_of(out, stage.seed, stage.pictures)
    return stage.train(out, captioner, FROZEN, {"vision": digest(vision)}, save_bundle, PROMPTS, shown)
