"""Batches of fresh captions, alike in length, and of questions; every draw is keyed by (seed, step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from vlmexport.calibration.data.scenes import ask, tell
from vlmexport.calibration.data.scenes.scene import Scene, mirror, sample_scene

from .captioner import Captioner, padded
from .prompts import drawn, questions

BUCKETS = 4  # batches that are drawn together and sorted by length


@dataclass(frozen=True)
class Batch:
    """Token ids as `padded` fills them up, and the rows of the pictures they belong to."""

    rows: np.ndarray  # [B]
    prompts: Tensor  # int64 [B, p]
    targets: Tensor  # int64 [B, t]


class Batches:
    """The batches of a training, by step.

    Args:
        captioner: whose ids they are. seed: of scenes and draws. indices: the training scenes.
        captions, questions: how many of each a step has; the questions are of other pictures.
        prompts: what asks for a caption, the usual one first; none for a model that takes none.
    """

    def __init__(
        self,
        captioner: Captioner,
        seed: int,
        indices: range,
        captions: int = 64,
        questions: int = 64,
        prompts: Sequence[str] = (),
    ) -> None:
        self.captioner, self.seed, self.indices = captioner, seed, indices
        self.captions, self.questions = captions, questions
        self.prompts = prompts
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
        prompt = self.captioner.prompt_ids(self._prompt(step)) if self.prompts else []
        return Batch(rows, padded([prompt] * len(rows)), padded(ids))

    def asked(self, step: int) -> Batch:
        """Questions with their answers."""
        rng = np.random.default_rng([self.seed, 19, step])
        rows = rng.integers(0, 2 * len(self.indices), self.questions)
        items = [ask(self.scene(int(row)), step + 1) for row in rows]
        prompts = [self.captioner.prompt_ids(text) for text in questions(items, rng)]
        return Batch(rows, padded(prompts), padded(self.captioner.text_ids([item.answer for item in items])))

    def _prompt(self, step: int) -> str:
        return drawn(self.prompts, np.random.default_rng([self.seed, 17, step]))

    def _draw(self, block: int) -> list[tuple[np.ndarray, list[list[int]]]]:
        rng = np.random.default_rng([self.seed, 13, block])
        rows = rng.integers(0, 2 * len(self.indices), BUCKETS * self.captions)
        ids = self.captioner.text_ids([tell(self.scene(int(row)), block + 1).text for row in rows])
        by_length = np.argsort([len(text) for text in ids], kind="stable")
        parts = by_length.reshape(BUCKETS, self.captions)[rng.permutation(BUCKETS)]
        return [(rows[part], [ids[i] for i in part]) for part in parts]
