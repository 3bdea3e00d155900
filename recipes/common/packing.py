"""Several texts about the same pictures in one sequence: they share the pictures' rows. Each sees the pictures and itself, at the
positions that it would have alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .captioner import IGNORED

_HERE = "\N{WHITE SQUARE}"


class Media(Protocol):
    """What stands before a text. Equal ones are laid out alike."""

    @property
    def stored(self) -> slice:
        """Which of the rows that are stored of it are seen."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Head:
    """All of a sequence up to the user's words: ids with marks [h], where rows stand [rows], positions [axes, h], and the
    position that comes next."""

    ids: Tensor
    places: Tensor
    positions: Tensor
    next: int


def plain_head(ids: Sequence[int], mark: int) -> Head:
    """The head whose positions count its ids; rows stand where the id is `mark`."""
    tokens = torch.tensor(ids)
    return Head(tokens, (tokens == mark).nonzero()[:, 0], torch.arange(len(ids))[None], len(ids))


def split_turn(tokenizer: PreTrainedTokenizerBase, parts: Sequence[dict[str, str]]) -> tuple[str, str]:
    """The chat template's text before and after the user's words, up to where the answer begins; `parts` of the message come before
    the words."""
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": _HERE}]}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    before, after = text.split(_HERE)
    return before, after


@dataclass(frozen=True)
class Packed:
    """A batch of sequences over one head. S: their common length.

    ids int64 [B, S]; positions int64 [axes, B, S]; targets int64 [B, S]: the next token where it is learned, else `IGNORED`;
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
    places = np.zeros((len(head.positions), len(texts), size), np.int64)
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
