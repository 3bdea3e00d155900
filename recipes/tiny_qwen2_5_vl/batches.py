"""Batches of pictures, pairs and films, each with several fresh texts; every draw is keyed by (seed, step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vlmexport.calibration.data.scenes import ask, tell
from vlmexport.calibration.data.scenes.asking import Asked
from vlmexport.calibration.data.scenes.film import Film, sample_film
from vlmexport.calibration.data.scenes.film_asking import ask_film
from vlmexport.calibration.data.scenes.film_story import tell_film
from vlmexport.calibration.data.scenes.pair import ask_pair, sample_pair
from vlmexport.calibration.data.scenes.scene import TRAIN, mirror, sample_scene

from ..common.captioner import IGNORED
from ..common.prompts import PROMPTS, drawn, questions
from ..common.roll_call import PROMPT, roll_call
from .captioner import Qwen25VL
from .film_call import film_call
from .layout import PAIR, PICTURE, Media, Packed, film_media, packed
from .tokenizer import FILM_PROMPTS

QUESTIONS = 5  # about each picture, pair or film; they are short, and share its rows

Text = tuple[list[int], list[int]]
"""A prompt and what is learned behind it."""


@dataclass(frozen=True)
class Batch:
    """Sequences over rows that are kept in a file: `rows` [B] says which. Where the first text of each is a description,
    `told` marks its places [B, S]; where the last is a roll call, `called` does."""

    media: Media
    rows: np.ndarray
    packed: Packed
    told: torch.Tensor
    called: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device; `rows` stay."""
        return Batch(
            self.media, self.rows, self.packed.to(device), self.told.to(device), self.called.to(device)
        )


class Batches:
    """The batches of a training, by step.

    Args:
        captioner: whose ids they are. seed: of scenes and draws.
        pictures: scenes whose pictures are kept; the second half of the rows are the mirrored ones.
        pairs, films: how many of each are kept, of the first scenes of `train`.
        sizes: pictures, pairs and films of a batch.
    """

    def __init__(
        self,
        captioner: Qwen25VL,
        seed: int,
        pictures: int,
        pairs: int,
        films: int,
        sizes: tuple[int, int, int],
    ) -> None:
        self.captioner, self.seed, self.sizes = captioner, seed, sizes
        self.pictures, self.pairs = pictures, pairs
        self._by_length: dict[int, list[int]] = {}
        for row in range(films):
            self._by_length.setdefault(sample_film(seed, TRAIN[row]).count, []).append(row)

    def of_captions(self, step: int) -> Batch:
        """A caption and a roll call of each picture."""
        return self.of_pictures(step, asked=False)

    def of_pictures(self, step: int, asked: bool = True) -> Batch:
        """A caption of each picture, if `asked` questions about it, and a roll call."""
        rng = np.random.default_rng([self.seed, 13, step])
        rows = rng.integers(0, 2 * self.pictures, self.sizes[0])
        texts = []
        for row in rows:
            plain = sample_scene(self.seed, TRAIN[row % self.pictures])
            scene = plain if row < self.pictures else mirror(plain)
            texts.append([self._told(PROMPTS, tell(scene, step + 1).text, rng)])
            if asked:
                texts[-1] += self._asked([ask(scene, variant) for variant in self._variants(step)], rng)
            texts[-1].append(self._told((PROMPT,), roll_call(scene, step + 1), rng))
        return self._batch(PICTURE, rows, texts, described=True, called=True)

    def of_pairs(self, step: int) -> Batch:
        """Questions about each pair of pictures."""
        rng = np.random.default_rng([self.seed, 19, step])
        rows = rng.integers(0, self.pairs, self.sizes[1])
        texts = []
        for row in rows:
            pair = sample_pair(self.seed, TRAIN[row])
            texts.append(self._asked([ask_pair(pair, v) for v in self._variants(step)], rng))
        return self._batch(PAIR, rows, texts, described=False)

    def of_films(self, step: int) -> Batch:
        """A story, questions and a roll call of each film; those of a step are of one length."""
        rng = np.random.default_rng([self.seed, 29, step])
        lengths = sorted(self._by_length)
        length = lengths[int(rng.integers(len(lengths)))]
        known = self._by_length[length]
        rows = np.array([known[i] for i in rng.integers(0, len(known), self.sizes[2])])
        texts = []
        for row in rows:
            film: Film = sample_film(self.seed, TRAIN[row])
            asked = [ask_film(film, variant) for variant in self._variants(step)]
            story = tell_film(film, step + 1).text
            called = self._told((PROMPT,), film_call(film, step + 1), rng)
            texts.append([self._told(FILM_PROMPTS, story, rng), *self._asked(asked, rng), called])
        return self._batch(film_media(length), rows, texts, described=True, called=True)

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
