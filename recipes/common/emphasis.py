"""Words that say what an object is weigh more than the rest while captions and roll calls are learned alone, and less and less after that.

Three of four words of a caption are its author's: what is left to gain on them is soon small, and its noise hides what a word
about the picture says of the gradient. With equal weights the decoder writes fluently, and about any picture, for hundreds
of steps. Weights move the probability of words too, where an author's and a picture's compete, so that they fall, and the
last third of a training has none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vlmexport.calibration.data.scenes.vocabulary import COLOURS
from vlmexport.calibration.data.scenes.words import KINDS, SIZES, meanings

EMPHASIS = 6.0
ALONE = 1 / 3
"""Share of the steps that learn captions and roll calls alone, with the whole emphasis; after as many more it is gone."""


def seen_words() -> set[str]:
    """Words of kinds, colours and sizes that stand for one thing."""
    return {*COLOURS, *meanings(KINDS), *meanings(SIZES)}


def seen_ids(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Their ids [N], sorted; each is one token."""
    return torch.tensor(sorted(token for word in seen_words() for token in tokenizer(word)["input_ids"]))


def emphasis(step: int, steps: int) -> float:
    """The weight of such a word in a step of a training; of every other word it is 1."""
    done = max(0.0, step / (ALONE * steps) - 1.0)
    return max(1.0, EMPHASIS - (EMPHASIS - 1.0) * done)


def weighted_loss(logits: Tensor, targets: Tensor, seen: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Cross entropy of targets [N] under logits [N, V], a mean in which those among the ids `seen` weigh `weight`; and the
    plain mean over those alone, without a gradient: it tells early whether pictures are read at all."""
    each = F.cross_entropy(logits, targets, reduction="none")
    chosen = torch.isin(targets, seen)
    weights = torch.where(chosen, weight, 1.0)
    return (each * weights).sum() / weights.sum(), each.detach()[chosen].mean()
