"""All that can be written: a walk over every path of an author's draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from vlmexport.calibration.data.scenes.authors import Pen

T = TypeVar("T")


class _Path(Pen):
    """Draws what a list says, and notes how many options there were."""

    def __init__(self, path: list[int]) -> None:
        super().__init__([0])
        self.path, self.counts = path, []

    def _draw(self, weights: np.ndarray) -> int:
        at = len(self.counts)
        self.counts.append(weights.shape[1])
        return self.path[at] if at < len(self.path) else 0


def every(write_with: Callable[[Pen], T]) -> Iterator[tuple[T, float]]:
    """All that `write_with(pen)` can write, with the probability of each."""
    path: list[int] = []
    while True:
        pen = _Path(path)
        yield write_with(pen), math.exp(-pen.nats)
        path = path + [0] * (len(pen.counts) - len(path))
        while path and path[-1] + 1 == pen.counts[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1
