"""How far a graph is from PyTorch, judged by how far PyTorch itself is from float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SHARE = 4.0
"""A graph may be this many times as far from float64 as PyTorch's own float32 …"""

FLOOR = 1e-6
"""… and this much further, of the largest value: what the last bits of float32 amount to."""

MOST = 0.5
"""No more than this, of the largest value, is ever allowed: a reference that is further from float64 is broken itself."""


@dataclass
class ParityRow:
    """What was compared for one graph; `relative_difference` (of the largest value) decides.

    `torch_difference` is what PyTorch's own float32 differs from float64 by, where `max_abs_difference` is the graph's
    difference from float64; None where values are compared as they are. `quantization_difference`, of a draft's graph
    whose matrices are integers, is how far (of the largest value) its values are from those of the network as it was
    trained; nothing is judged by it.
    """

    graph: str
    reference: str
    inputs: str
    values: int
    max_abs_difference: float
    relative_difference: float
    limit: float
    torch_difference: float | None = None
    quantization_difference: float | None = None

    @property
    def ok(self) -> bool:
        """Within the limit (a NaN is not)."""
        return bool(self.relative_difference <= self.limit)

    def to_dict(self) -> dict[str, Any]:
        """The manifest's entry."""
        return {
            name: value
            for name, value in vars(self).items()
            if name != "quantization_difference" or value is not None
        }


@dataclass
class _Kind:
    """Values of one kind: the largest differences from float64 of a graph and of PyTorch, and the largest value."""

    ours: float = 0.0
    theirs: float = 0.0
    largest: float = 0.0

    def limit(self, share: float, floor: float) -> float:
        if not self.largest:
            return floor
        allowed = floor + share * self.theirs / self.largest
        return min(allowed, MOST) if np.isfinite(allowed) else 0.0

    @property
    def relative(self) -> float:
        if not np.isfinite(self.ours):
            return float("inf")
        return self.ours / self.largest if self.largest else float(self.ours > 0)


class Tally:
    """Collects differences of one graph, by the kind of value: hidden states, keys and logits are of different sizes."""

    def __init__(self) -> None:
        self.values = 0
        self._kinds: dict[str, _Kind] = {}

    def add(
        self, kind: str, actual: np.ndarray, expected: np.ndarray, error: np.ndarray | None = None
    ) -> None:
        """`expected` is PyTorch's, `error` what it has too much of, as float64 shows; None: nothing."""
        tally = self._kinds.setdefault(kind, _Kind())
        if actual.shape != expected.shape:
            tally.ours = float("inf")
            return
        self.values += actual.size
        if not actual.size:
            return
        difference = actual.astype(np.float64) - expected
        if error is not None:
            difference += error
            tally.theirs = max(tally.theirs, float(np.max(np.abs(error))))
        ours = float(np.max(np.abs(difference, out=difference)))
        tally.ours = max(tally.ours, ours if np.isfinite(ours) else float("inf"))
        tally.largest = max(tally.largest, float(np.max(np.abs(expected))))

    @property
    def furthest(self) -> float:
        """The largest difference, of the largest value of its kind."""
        return max((kind.relative for kind in self._kinds.values()), default=0.0)

    def row(
        self, graph: str, reference: str, inputs: str, *, share: float = 0.0, floor: float = 0.0
    ) -> ParityRow:
        """The kind that is nearest to its limit, or furthest beyond it."""

        def ratio(kind: _Kind) -> float:
            limit = kind.limit(share, floor)
            return kind.relative / limit if limit else float("inf") if kind.relative else 0.0

        worst = max(self._kinds.values(), key=ratio, default=_Kind())
        return ParityRow(
            graph, reference, inputs, self.values, worst.ours, worst.relative, worst.limit(share, floor),
            worst.theirs if share else None,
        )  # fmt: skip
