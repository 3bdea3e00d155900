"""Layer dropout: in a step of the last stage every layer is left out by chance, the later the likelier.

A decoder of twelve layers has work for six on these texts, and nothing tells it to do any of it early: towards the end of its
training its first quarter says ever less of what is said in the end. With layers missing, what can be said early is. It is the
dropout of LayerSkip (arXiv:2404.16710, section 4.1; there its rates grow exponentially), without that paper's loss on early
layers: only what the whole decoder says is learned from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

MOST = 0.4
"""The rate of the last layer; it grows linearly from 0, the first one's."""


def rates(layers: int) -> np.ndarray:
    """The chance of each layer to be left out."""
    return MOST * np.arange(layers) / (layers - 1)


@contextmanager
def without(layers: Iterable[nn.Module], left_out: np.ndarray) -> Iterator[None]:
    """While it lasts, layers give what they get where `left_out`, bool [layers], says so. A layer takes its rows [B, t, width]
    first and gives them alone."""

    def same(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden

    chosen = [layer for layer, out in zip(layers, left_out, strict=True) if out]
    for layer in chosen:
        layer.forward = same
    try:
        yield
    finally:
        for layer in chosen:
            del layer.forward
