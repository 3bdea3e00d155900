"""Batches of pictures, each with several fresh texts in one sequence; every draw is keyed by (seed, step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vlmexport.calibration.data.scenes import ask, tell
from vlmexport.calibration.data.scenes.asking import Asked
from vlmexport.calibration.data.scenes.scene import TRAIN, mirror, sample_scene

from .captioner import IGNORED
from .packed_captioner import PackedCaptioner
from .packing import Media, Packed, packed
from .prompts import PROMPTS, drawn, questions
from .roll_call import PROMPT, roll_call

QUESTIONS = 5  # about each picture, pair or film; they are short, and share its rows

Text = tuple[list[int], list[int]]
"""A prompt and what is learned behind it."""


@dataclass(frozen=True)
class Batch:
    """Sequences over rows that are kept in a file: `rows` [B] says which. Where the first text of each is a description,
    `told` marks its places [B, S]; where the last is a roll call, `called` does."""

    media: Any
    rows: np.ndarray
    packed: Packed
    told: torch.Tensor
    called: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device; `rows` stay."""
        return Batch(
            self.media, self.rows, self.packed.to(device), self.told.to(device), self.called.to(device)
        )


class PictureBatches:
    """The batches of a training, by step.

    Args:
        captioner: whose ids they are. seed: of scenes and draws.
        pictures: scenes whose pictures are kept; the second half of the rows are the mirrored ones. size: pictures of a batch.
    """

    def __init__(self, captioner: PackedCaptioner, seed: int, pictures: int, size: int) -> None:
        self.captioner, self.seed, self.pictures, self.size = captioner, seed, pictures, size

    def of_captions(self, step: int, media: Media | None = None) -> Batch:
        """A caption and a roll call of each picture, which is shown as `media`, by default as usual."""
        return self.of_pictures(step, media, asked=False)

    def of_pictures(self, step: int, media: Media | None = None, asked: bool = True) -> Batch:
        """A caption of each picture, if `asked` questions about it, and a roll call."""
        rng = np.random.default_rng([self.seed, 13, step])
        rows = rng.integers(0, 2 * self.pictures, self.size)
        texts = []
        for row in rows:
            plain = sample_scene(self.seed, TRAIN[row % self.pictures])
            scene = plain if row < self.pictures else mirror(plain)
            texts.append([self._told(PROMPTS, tell(scene, step + 1).text, rng)])
            if asked:
                texts[-1] += self._asked([ask(scene, variant) for variant in self._variants(step)], rng)
            texts[-1].append(self._told((PROMPT,), roll_call(scene, step + 1), rng))
        return self._batch(media or self.captioner.picture, rows, texts, described=True, called=True)

    def _variants(self, step: int) -> range:
        """Those of a step's questions; 0 is for evaluation."""
        return range(QUESTIONS * step + 1, QUESTIONS * (step + 1) + 1)

    def _told(self, prompts: Sequence[str], text: str, rng: np.random.Generator) -> Text:
        return self.captioner.prompt_ids(drawn(prompts, rng)), self.captioner.text_ids([text])[0]

    def _asked(self, asked: Sequence[Asked], rng: np.random.Generator) -> list[Text]:
        texts = questions(asked, rng)
        answers = self.captioner.text_ids([a.answer for a in asked])
        return [(self.captioner.prompt_ids(text), ids) for text, ids in zip(texts, answers, strict=True)]

    def _batch(
        self, media: Media, rows: np.ndarray, texts: list[list[Text]], described: bool, called: bool = False
    ) -> Batch:
        sequences = packed(self.captioner.head_of(media), texts)
        learned = sequences.targets != IGNORED
        told, last = sequences.group == 1, sequences.group == len(texts[0])
        return Batch(media, rows, sequences, learned & told & described, learned & last & called)
