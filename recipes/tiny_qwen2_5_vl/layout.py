"""How pictures and films stand in a sequence before texts about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from vlmexport.runtime.families.mrope import Span, positions

from ..common.packing import Head
from ..common.packing import split_turn as split
from .tokenizer import IMAGE, VIDEO
from .tower import FRAMES, ROWS, UNITS, tower_config


@dataclass(frozen=True)
class Media:
    """What stands before a text: so many pictures ("image"), or one film of so many pairs of frames ("video")."""

    kind: str
    count: int

    @property
    def rows(self) -> int:
        """Rows of all pictures, or of all pairs of frames."""
        return self.count * ROWS

    @property
    def stored(self) -> slice:
        """All: those of a shorter film come first."""
        return slice(self.rows)


PICTURE, PAIR = Media("image", 1), Media("image", 2)


def film_media(frames: int) -> Media:
    """A film of so many frames."""
    return Media("video", frames // FRAMES)


def split_turn(tokenizer: PreTrainedTokenizerBase, media: Media) -> tuple[str, str]:
    """The chat template's text before and after the user's words, up to where the answer begins."""
    parts = [{"type": media.kind}] * (media.count if media.kind == "image" else 1)
    return split(tokenizer, parts)


def head_of(tokenizer: PreTrainedTokenizerBase, media: Media, seconds: float) -> Head:
    """The head of a sequence; `seconds` between two pairs of frames."""
    mark: Any = tokenizer.convert_tokens_to_ids(IMAGE if media.kind == "image" else VIDEO)
    held = ROWS if media.kind == "image" else media.rows
    ids: list[int] = []
    spans: list[Span] = []
    for token in tokenizer(split_turn(tokenizer, media)[0])["input_ids"]:
        if token != mark:
            ids.append(token)
            continue
        interval = 1.0 if media.kind == "image" else tower_config().tokens_per_second * seconds
        spans.append(Span(len(ids), held // ROWS, UNITS, UNITS, interval))
        ids += [token] * held
    tokens = torch.tensor(ids)
    # One token more says where the text goes on.
    places = torch.from_numpy(positions(len(ids) + 1, spans))
    return Head(tokens, (tokens == mark).nonzero()[:, 0], places[:, :-1], int(places[0, -1]))
