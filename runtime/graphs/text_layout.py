"""How the text of a request lies in a device's memory, for the graphs `penalties` and `repeats`.

| places | hold |
|---|---|
| `lead` | nothing: what the first tokens have before them |
| `room` | the tokens of the text, the prompt's first |
| `words` | words that must not come (`repeats` only), one behind the other |
| 1 | nothing: what is not on the way to a row is written here |

Nothing is −1. A token that the vocabulary does not hold (a placeholder of images) is a negative number of its own: it
can be compared, but neither penalised nor forbidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..bundle.manifest import Limits

CONTEXT = 7
"""Tokens that may decide whether the next one is forbidden: n-grams and words have at most one more."""

WORDS = 512
"""Tokens of forbidden words."""

NOTHING = -1


@dataclass(frozen=True)
class TextLayout:
    """Numbers of places, see the module."""

    lead: int
    room: int

    @classmethod
    def of(cls, limits: Limits) -> TextLayout:
        """That of a bundle."""
        return cls(max(CONTEXT, limits.max_width), limits.max_length + limits.max_width)

    @property
    def places(self) -> int:
        """All of them."""
        return self.lead + self.room + WORDS + 1

    @property
    def compared(self) -> int:
        """Those behind the lead, whose tokens may be forbidden."""
        return self.places - self.lead

    @property
    def first_word(self) -> int:
        """Where words begin."""
        return self.lead + self.room


def valid_ids(tokens: Sequence[int], vocabulary: int) -> np.ndarray:
    """int64 [n]: tokens as they lie there."""
    ids = np.asarray(tokens, np.int64)
    return np.where(ids < vocabulary, ids, NOTHING - ids)
