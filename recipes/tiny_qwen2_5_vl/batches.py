"""Batches of pictures, pairs and films, each with several fresh texts; every draw is keyed by (seed, step)."""

from __future__ import annotations

import numpy as np
from vlmexport.calibration.data.scenes.film import Film, sample_film
from vlmexport.calibration.data.scenes.film_asking import ask_film
from vlmexport.calibration.data.scenes.film_story import tell_film
from vlmexport.calibration.data.scenes.pair import ask_pair, sample_pair
from vlmexport.calibration.data.scenes.scene import TRAIN

from ..common.packed_batches import Batch, PictureBatches
from ..common.roll_call import PROMPT
from .captioner import Qwen25VL
from .film_call import film_call
from .layout import PAIR, film_media
from .tokenizer import FILM_PROMPTS


class Batches(PictureBatches):
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
        super().__init__(captioner, seed, pictures, sizes[0])
        self.pairs, self.sizes = pairs, sizes
        self._by_length: dict[int, list[int]] = {}
        for row in range(films):
            self._by_length.setdefault(sample_film(seed, TRAIN[row]).count, []).append(row)

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
