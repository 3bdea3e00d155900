"""How pictures, films and texts stand in a sequence. Several texts about the same pictures share them: each sees the
pictures and itself, at the positions that it would have alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vlmexport.runtime.families.mrope import Span, positions

from ..common.captioner import IGNORED
from .tokenizer import IMAGE, VIDEO
from .tower import FRAMES, ROWS, UNITS, tower_config

_HERE = "\N{WHITE SQUARE}"


@dataclass(frozen=True)
class Media:
    """What stands before a text: so many pictures ("image"), or one film of so many pairs of frames ("video")."""

    kind: str
    count: int

    @property
    def rows(self) -> int:
        """Rows of all pictures, or of all pairs of frames."""
        return self.count * ROWS


PICTURE, PAIR = Media("image", 1), Media("image", 2)


def film_media(frames: int) -> Media:
    """A film of so many frames."""
    return Media("video", frames // FRAMES)


@dataclass(frozen=True)
class Head:
    """All of a sequence up to the user's words: ids with marks [h], where rows stand [rows], positions [3, h], and the
    position that comes next."""

    ids: Tensor
    places: Tensor
    positions: Tensor
    next: int


def split_turn(tokenizer: PreTrainedTokenizerBase, media: Media) -> tuple[str, str]:
    """The chat template's text before and after the user's words, up to where the answer begins."""
    parts = [{"type": media.kind}] * (media.count if media.kind == "image" else 1)
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": _HERE}]}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    before, after = text.split(_HERE)
    return before, after


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


@dataclass(frozen=True)
class Packed:
    """A batch of sequences over one head. S: their common length.

    ids int64 [B, S]; positions int64 [3, B, S]; targets int64 [B, S]: the next token where it is learned, else `IGNORED`;
    group int64 [B, S]: which text of its sequence a place belongs to, from 1, 0 for the head, -1 for nothing.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    group: Tensor

    @property
    def mask(self) -> Tensor:
        """What each place sees, bool [B, 1, S, S]; of S² values, so that it is made where it is used."""
        group, size = self.group, self.group.shape[1]
        seen = (group[:, :, None] == group[:, None, :]) | (group[:, None, :] == 0)
        return (seen & torch.ones(size, size, dtype=torch.bool, device=group.device).tril())[:, None]

    def to(self, device: torch.device) -> Packed:
        """The same on a device."""
        return Packed(*(part.to(device) for part in (self.ids, self.positions, self.targets, self.group)))


def packed(head: Head, texts: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> Packed:
    """Puts texts, (prompt, what is learned) each, behind the head; one list of them per sequence."""
    start = len(head.ids)
    size = start + max(sum(len(p) + len(t) for p, t in row) for row in texts)
    ids = np.zeros((len(texts), size), np.int64)
    ids[:, :start] = head.ids
    places = np.zeros((3, len(texts), size), np.int64)
    places[:, :, :start] = head.positions[:, None]
    targets, group = np.full((2, len(texts), size), IGNORED, np.int64)
    group[:, :start], group[:, start:] = 0, -1
    for row, several in enumerate(texts):
        at = start
        for number, (prompt, target) in enumerate(several, 1):
            end = at + len(prompt) + len(target)
            ids[row, at:end] = [*prompt, *target]
            places[:, row, at:end] = head.next + np.arange(end - at)
            group[row, at:end] = number
            targets[row, at + len(prompt) - 1 : end - 1] = target
            at = end
    return Packed(*map(torch.from_numpy, (ids, places, targets, group)))
