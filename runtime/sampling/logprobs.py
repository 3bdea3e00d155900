"""Log-probabilities of the tokens that a request emits.

They are the model's own, before temperature, penalties and grammars: vLLM's `raw_logprobs`, its default.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..common.errors import OptionError
from ..common.validation import integer

MOST = 20
"""Alternatives of a token that may be asked for, as OpenAI's API has it."""


class TokenLogprob(NamedTuple):
    """A token's log-probability (natural logarithm), and the likeliest tokens of its place with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    drafted: bool = False
    """Whether a draft proposed it, and the target accepted it."""


class Logprobs:
    """Collects the log-probabilities of one request; `entries` is in step with its tokens, between two cycles."""

    def __init__(self, top: int):
        """`top`: how many of the likeliest tokens are noted for each, at most 20. Raises `OptionError`."""
        self._top = integer("logprobs", top, 0, MOST)
        self.entries: list[TokenLogprob] = []

    def add(self, token: int, logits: np.ndarray, drafted: bool = False) -> None:
        """The next token, the target's logits float32 [V] that it was chosen from, and whether a draft proposed it."""
        values = logits.astype(np.float64)
        values -= values.max()
        values -= np.log(np.exp(values).sum())
        self.entries.append(TokenLogprob(token, float(values[token]), self._likeliest(values), drafted))

    def cut(self, length: int) -> None:
        """Forget what stands behind the first `length` tokens: a cycle may choose more than it emits."""
        del self.entries[length:]

    def _likeliest(self, values: np.ndarray) -> list[tuple[int, float]]:
        """(token, value) of the largest values [V]; the lowest id first among equals."""
        count = min(self._top, len(values))
        if not count:
            return []
        least = np.partition(values, -count)[-count]
        candidates = np.flatnonzero(values >= least)
        order = candidates[np.argsort(-values[candidates], kind="stable")][:count]
        return [(int(token), float(values[token])) for token in order]


def check_logprobs(name: str, value: Any) -> Logprobs:
    """A number of tokens, or what collects them. Raises `OptionError`."""
    if not isinstance(value, Logprobs):
        return Logprobs(value)
    if value.entries:
        raise OptionError(f"{name}: these hold {len(value.entries)} tokens of another request; make new ones")
    return value
