"""Words that the picture decides weigh more than the rest in the first half of a training.

Three of four words of a caption are its author's: what is left to gain on them is soon small, and its noise hides what a word
about the picture says of the gradient. With equal weights the decoder writes fluently, and about any picture, for hundreds
of steps. Weights move the probability of words too, where an author's and a picture's compete, so that they fall, and the
second half has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...scenes.film_words import CHANGES, DEEDS, SPOTS
from ...scenes.vocabulary import COLOURS
from ...scenes.words import DEPTHS, GAPS, KINDS, LANES, NUMBERS, PATTERNS, SIZES, TABLES, WALLS

EMPHASIS = 6.0
SHARE = 0.5
"""Of a training in which weights fall to 1."""

_COMMON = {"a", "and", "as", "at", "away", "by", "in", "is", "it", "of", "on", "the", "this", "up", "with"}


def seen_words() -> set[str]:
    """Words by which texts say what is in a picture or a film, or where; not those that any sentence has."""

    def phrases() -> Iterator[Iterable[str]]:
        yield from (COLOURS, NUMBERS.values(), CHANGES.values(), ("left", "right"))
        for table in (DEPTHS, GAPS, KINDS, PATTERNS, SIZES, TABLES, WALLS, DEEDS):
            yield from table.values()
        yield from (*LANES, *SPOTS)

    words = {word.rstrip("-") for some in phrases() for phrase in some for word in phrase.split()}
    return words - _COMMON - {""}


def seen_ids(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Their ids [N], sorted."""
    return torch.tensor(sorted({tokenizer(word)["input_ids"][-1] for word in seen_words()}))


def emphasis(step: int, steps: int) -> float:
    """The weight of such a word in a step of a training, falling linearly; of every other word it is 1."""
    return max(1.0, EMPHASIS - (EMPHASIS - 1.0) * step / (SHARE * steps))


def weighted_loss(logits: Tensor, targets: Tensor, seen: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Cross entropy of targets [N] under logits [N, V], a mean in which those among the ids `seen` weigh `weight`; and the
    plain mean over those alone, without a gradient: it tells early whether pictures are read at all."""
    each = F.cross_entropy(logits, targets, reduction="none")
    chosen = torch.isin(targets, seen)
    weights = torch.where(chosen, weight, 1.0)
    return (each * weights).sum() / weights.sum(), each.detach()[chosen].mean()
