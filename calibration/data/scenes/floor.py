"""The generator's own uncertainty: no model can be less surprised by these texts than this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .caption import tell
from .scene import Scene


@dataclass(frozen=True)
class Floor:
    """Mean -log probability of sampled captions given their scenes, each probability exact (a sum over all authors)."""

    captions: int
    tokens: int
    nats: float  # per token
    error: float  # standard error of `nats`, from the captions drawn

    @property
    def perplexity(self) -> float:
        """exp(nats): the least perplexity per token that a reader of the picture can reach."""
        return math.exp(self.nats)


def measure_floor(
    scenes: Iterable[Scene], length: Callable[[str], int], variants: Iterable[int] = (0,)
) -> Floor:
    """The floor on the captions of `scenes` in these variants.

    Args:
        length: tokens of a text, the end token included.
    """
    samples = [(told.nats, length(told.text)) for s in scenes for told in (tell(s, v) for v in variants)]
    nats, tokens = sum(n for n, _ in samples), sum(t for _, t in samples)
    rate = nats / tokens
    spread = sum((n - rate * t) ** 2 for n, t in samples)
    return Floor(len(samples), tokens, rate, math.sqrt(spread) / tokens)
