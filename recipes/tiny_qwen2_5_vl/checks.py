"""Figures of a model on films and on pairs of pictures that it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vlmexport.calibration.data.scenes.dataset import film_pictures, resized
from vlmexport.calibration.data.scenes.film import Film, sample_film
from vlmexport.calibration.data.scenes.film_asking import ask_film, film_answer_value
from vlmexport.calibration.data.scenes.film_story import DESCRIBE_FILM, score_story, tell_film, total_story
from vlmexport.calibration.data.scenes.pair import ask_pair, pair_answer_value, sample_pair

from ..common.checks import answered, by_type, described, nats_of, share, surprise_of
from .layout import PAIR, film_media
from .tower import FRAMES, SIDE

if TYPE_CHECKING:
    from .captioner import Qwen25VL

GREY = 200  # films with grey frames


class ViewChecks:
    """Films and pairs of some scenes with their embeddings, and the figures of a model on them.

    Args:
        captioner: encodes them, once, and is asked. seed, indices: which scenes.
        grey: all pictures are grey all over; films and texts are as they were.
    """

    def __init__(self, captioner: Qwen25VL, seed: int, indices: Sequence[int], grey: bool = False) -> None:
        self.captioner, self.grey = captioner, grey
        self.films: dict[int, list[Film]] = {}  # by number of frames
        embeds: dict[int, list[Tensor]] = {}
        for index in indices:
            film = sample_film(seed, index)
            frames = self._shown(film_pictures(seed, index, SIDE)).reshape(-1, FRAMES, SIDE, SIDE, 3)
            self.films.setdefault(film.count, []).append(film)
            embeds.setdefault(film.count, []).append(captioner.pair_rows(frames).flatten(0, 1))
        self.film_rows = {count: torch.stack(parts) for count, parts in embeds.items()}
        self.pairs = [sample_pair(seed, index) for index in indices]
        self.pair_rows = torch.cat(
            [
                captioner.rows(self._shown(np.stack([resized(s, SIDE) for s in pair.scenes]))).flatten(0, 1)[
                    None
                ]
                for pair in self.pairs
            ]
        )
        self.prompt = captioner.prompt_ids(DESCRIBE_FILM)

    def figures(self) -> dict[str, float]:
        """The short form, rounded, for a log."""
        stories = self.stories()
        result = {
            "story_facts": total_story(score_story(text, film) for text, film, _ in stories),
            "story_over_floor": self.surprise()["over_floor"],
            "film_answers": share(self.film_answers()),
            "pair_answers": share(self.pair_answers()),
        }
        return {name: round(value, 4) for name, value in result.items()}

    def stories(self) -> list[tuple[str, Film, Film]]:
        """Greedy stories, each with its film and with another one of the same length."""
        stories: list[tuple[str, Film, Film]] = []
        for count, films in self.films.items():
            captioner = self.captioner.answering(film_media(count))
            ids = described(captioner, self.film_rows[count], self.prompt)
            stories += zip(captioner.say(ids), films, [*films[1:], films[0]], strict=True)
        return stories

    def surprise(self) -> dict[str, float]:
        """As `Checks.surprise`, of stories."""
        nats = floor = 0.0
        tokens = 0
        for count, films in self.films.items():
            captioner = self.captioner.answering(film_media(count))
            told = [tell_film(film) for film in films]
            ids = captioner.text_ids([t.text for t in told])
            nats += nats_of(captioner, self.film_rows[count], self.prompt, ids)
            floor += sum(t.nats for t in told)
            tokens += sum(map(len, ids))
        return surprise_of(nats, floor, tokens)

    def film_answers(self) -> dict[str, list[bool]]:
        """By type of question, which answers about films say the right thing."""
        by_kind: dict[str, list[bool]] = {}
        for count, films in self.films.items():
            captioner = self.captioner.answering(film_media(count))
            asked = [ask_film(film) for film in films]
            for kind, right in answered(captioner, self.film_rows[count], asked, film_answer_value).items():
                by_kind.setdefault(kind, []).extend(right)
        return by_kind

    def pair_answers(self) -> dict[str, list[bool]]:
        """By type of question, which answers about pairs say the right thing."""
        asked = [ask_pair(pair) for pair in self.pairs]
        return answered(self.captioner.answering(PAIR), self.pair_rows, asked, pair_answer_value)

    def _shown(self, pictures: np.ndarray) -> np.ndarray:
        return np.full_like(pictures, 128) if self.grey else pictures


def evaluate_views(captioner: Qwen25VL, seed: int, indices: Sequence[int]) -> dict[str, Any]:
    """Figures of films and pairs for an evaluation: with the right pictures, of another film, and grey."""
    checks = ViewChecks(captioner, seed, indices)
    grey = ViewChecks(captioner, seed, indices[:GREY], grey=True)
    stories, films, pairs = checks.stories(), checks.film_answers(), checks.pair_answers()
    return {
        "story_facts": round(total_story(score_story(text, film) for text, film, _ in stories), 4),
        "story_perplexity": {name: round(value, 4) for name, value in checks.surprise().items()},
        "film_answers": round(share(films), 4),
        "film_answers_by_type": by_type(films),
        "film_wrong": round(total_story(score_story(text, other) for text, _, other in stories), 4),
        "film_grey": round(total_story(score_story(text, film) for text, film, _ in grey.stories()), 4),
        "film_answers_grey": round(share(grey.film_answers()), 4),
        "pair_answers": round(share(pairs), 4),
        "pair_answers_by_type": by_type(pairs),
        "pair_answers_grey": round(share(grey.pair_answers()), 4),
    }
