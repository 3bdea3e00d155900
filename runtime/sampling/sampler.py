"""From logits to a token: temperature, top-k, top-p, min-p, and one uniform per emitted token.

The uniform of emitted token i depends on (seed, i) only, never on how many look-ahead tokens were drafted and
thrown away. With draw-and-match verification the speculative stream therefore equals the plain one.

Small temperatures and probabilities leave the range of float64, which is what they mean: the likeliest token, and nothing of
the others. What a program asked numpy to do then (`np.seterr`) is for its own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..common.validation import integer, number

_MASK = (1 << 64) - 1

ACCEPTING, DRAWING_AGAIN, FORCING, PROPOSING = 0xACCE, 0xD3A3, 0x5EED, 0xD4AF
"""Streams of uniforms (`Sampling.uniform`) beside that of the tokens themselves."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep the whole vocabulary."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        # Plain Python numbers from here on: a numpy integer would overflow in `counter_uniform`.
        for name, value in (
            ("temperature", number("temperature", self.temperature, 0)),
            ("top_k", integer("top_k", self.top_k, 0)),
            ("top_p", number("top_p", self.top_p, 0, 1, above=True)),
            ("seed", integer("seed", self.seed, 0, _MASK)),
            ("min_p", number("min_p", self.min_p, 0, 1)),
        ):
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def uniform(self, index: int, stream: int = 0) -> float:
        """The uniform in [0, 1) of emitted token `index`: splitmix64 of (seed, index), 53 bits. Other streams have
        uniforms of their own for the same token."""
        return counter_uniform(self.seed ^ stream, index)

    def choose(self, logits: np.ndarray, index: int) -> int:
        """Token number `index` of the output from its logits [V]; ties go to the lowest id."""
        if self.temperature == 0:
            return int(logits.argmax())
        return draw(self.probabilities(logits), self.uniform(index))

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """The distribution tokens are drawn from, float64 [V], after temperature, top-k, top-p and min-p."""
        return warp(logits, self.temperature, self.top_k, self.top_p, self.min_p)


def counter_uniform(seed: int, index: int) -> float:
    """Uniform in [0, 1) as a pure function of two counters (splitmix64, Steele et al. 2014, applied twice)."""
    return (_mix(_mix(seed) + index + 1) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@np.errstate(all="ignore")
def warp(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities float64 [V] from float logits [V]; at temperature 0 a point mass on the lowest best id.

    top-k keeps every token as likely as the k-th; top-p keeps the smallest set of most likely tokens (lower
    ids first among equals) whose mass reaches top_p; min-p keeps tokens at least min_p times as likely as the
    likeliest (arXiv 2407.01082). In this order, which is transformers'.
    """
    if temperature == 0:
        out = np.zeros(logits.shape, np.float64)
        out[int(logits.argmax())] = 1.0
        return out
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= temperature
    if 0 < top_k < scaled.size:
        kth = np.partition(scaled, scaled.size - top_k)[scaled.size - top_k]
        scaled[scaled < kth] = -np.inf
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= top_p]] = 0
        probabilities /= probabilities.sum()
    if min_p > 0:
        probabilities[probabilities < min_p * probabilities.max()] = 0
        probabilities /= probabilities.sum()
    return probabilities


@np.errstate(all="ignore")
def draw(weights: np.ndarray, uniform: float) -> int:
    """Index drawn from unnormalised non-negative `weights` [V] by inverse CDF; never one of weight zero."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index >= weights.size or weights[index] <= 0:  # rounding at the upper end
        index = int(np.flatnonzero(weights > 0)[-1])
    return index
