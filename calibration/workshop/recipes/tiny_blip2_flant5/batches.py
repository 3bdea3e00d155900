"""Batches of fresh captions, alike in length, and of questions; every draw is keyed by (seed, step)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...scenes import ask, tell
from ...scenes.scene import Scene, mirror, sample_scene
from .prompts import PROMPTS

BUCKETS = 4  # batches that are drawn together and sorted by length


@dataclass(frozen=True)
class Batch:
    """Token ids padded with 0, and the rows of the pictures they belong to."""

    rows: np.ndarray  # [B]
    prompts: Tensor  # int64 [B, p]
    targets: Tensor  # int64 [B, t]


class Batches:
    """The batches of a training, by step.

    Args:
        tokenizer: of the model. seed: of scenes and draws. indices: the training scenes.
        captions, questions: how many of each a step has; the questions are of other pictures.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        indices: range,
        captions: int = 64,
        questions: int = 64,
    ) -> None:
        self.tokenizer, self.seed, self.indices = tokenizer, seed, indices
        self.captions, self.questions = captions, questions
        self._block = -1
        self._drawn: list[tuple[np.ndarray, list[list[int]]]] = []

    def scene(self, row: int) -> Scene:
        """The scene of a row; the second half of the rows are the mirrored pictures."""
        plain = sample_scene(self.seed, self.indices[row % len(self.indices)])
        return plain if row < len(self.indices) else mirror(plain)

    def told(self, step: int) -> Batch:
        """Captions that no other step has: their variant is the block's number, from 1 (0 is for evaluation)."""
        block, place = divmod(step, BUCKETS)
        if block != self._block:
            self._drawn, self._block = self._draw(block), block
        rows, ids = self._drawn[place]
        rng = np.random.default_rng([self.seed, 17, step])
        prompt = PROMPTS[0] if rng.random() < 0.6 else PROMPTS[int(rng.integers(len(PROMPTS)))]
        return Batch(rows, padded(self.tokenizer([prompt] * len(rows))["input_ids"]), padded(ids))

    def asked(self, step: int) -> Batch:
        """Questions with their answers."""
        rng = np.random.default_rng([self.seed, 19, step])
        rows = rng.integers(0, 2 * len(self.indices), self.questions)
        items = [ask(self.scene(int(row)), step + 1) for row in rows]
        upper = rng.random(len(items)) < 0.3
        texts = [i.text.capitalize() if up else i.text for i, up in zip(items, upper, strict=True)]
        answers = [item.answer for item in items]
        return Batch(
            rows, padded(self.tokenizer(texts)["input_ids"]), padded(self.tokenizer(answers)["input_ids"])
        )

    def _draw(self, block: int) -> list[tuple[np.ndarray, list[list[int]]]]:
        rng = np.random.default_rng([self.seed, 13, block])
        rows = rng.integers(0, 2 * len(self.indices), BUCKETS * self.captions)
        ids = self.tokenizer([tell(self.scene(int(row)), block + 1).text for row in rows])["input_ids"]
        by_length = np.argsort([len(text) for text in ids], kind="stable")
        parts = by_length.reshape(BUCKETS, self.captions)[rng.permutation(BUCKETS)]
        return [(rows[part], [ids[i] for i in part]) for part in parts]


def padded(lists: list[list[int]]) -> Tensor:
    """Rows of ids as one int64 tensor, as wide as the longest and filled with 0."""
    width = max(1, *map(len, lists))
    return torch.tensor([row + [0] * (width - len(row)) for row in lists])
