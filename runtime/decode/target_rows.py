"""What the target says after the rows of a pass: its best token and its logits, read no earlier than needed."""

from __future__ import annotations

import math

import numpy as np

from ..engines.base import Engine, View
from ..errors import NumericsError


class TargetRows:
    """Results of one `head` call, valid until the next one into the same buffers.

    On an engine in host memory the logits are read in place and `best` is their argmax. Elsewhere a head that offers
    `best` (int64 [rows]) and `finite` (bool [rows]) saves the way of the logits: they are read when asked for.
    """

    __slots__ = ("_array", "_best", "_engine", "_finite", "_graph", "_logits", "_outputs")

    def __init__(
        self,
        engine: Engine,
        logits: View,
        best: View | None = None,
        finite: View | None = None,
        graph: str = "head",
    ):
        """`logits` float32 [rows, V]; `graph` is named where a row is not finite."""
        self._engine, self._logits, self._graph = engine, logits, graph
        self._outputs = (best, finite)
        self._array: np.ndarray | None = engine.read(logits) if engine.host_memory else None
        self._best: np.ndarray | None = None
        self._finite: np.ndarray | None = None

    def fresh(self) -> TargetRows:
        """The call ran again: forget what was read. Returns itself."""
        if not self._engine.host_memory:
            self._array = self._best = self._finite = None
        return self

    def best(self, row: int) -> int:
        """The most likely token after `row`, the lowest id among equals. Raises `NumericsError` for NaN or infinity."""
        array = self._array
        if array is None:
            if self._outputs[0] is not None:
                return self._device_best(row)
            array = self._read()
        values = array[row]
        token = int(values.argmax())
        # NaN and +inf win every comparison, and −inf wins only where nothing else is: one value tells.
        if not math.isfinite(values[token]):
            raise self._not_finite(float(values[token]))
        return token

    def logits(self, row: int) -> np.ndarray:
        """Logits [V] after `row`, float32; not to be written."""
        array = self._array
        return (self._read() if array is None else array)[row]

    def finite(self, row: int) -> bool:
        """Whether the row has a best token: no NaN, no +inf, not −inf everywhere."""
        if self._array is None and self._outputs[1] is not None:
            if self._finite is None:
                self._finite = self._engine.read(self._outputs[1])
            return bool(self._finite[row])
        values = self.logits(row)
        return math.isfinite(values[int(values.argmax())])

    def check(self, row: int) -> None:
        """Raise `NumericsError` unless `finite(row)`."""
        if not self.finite(row):
            raise self._not_finite(math.nan)

    def _device_best(self, row: int) -> int:
        if self._best is None:
            assert self._outputs[0] is not None
            self._best = self._engine.read(self._outputs[0])
        self.check(row)
        return int(self._best[row])

    def _read(self) -> np.ndarray:
        if self._array is None:
            self._array = self._engine.read(self._logits)
        return self._array

    def _not_finite(self, value: float) -> NumericsError:
        return NumericsError(
            f"graph {self._graph} gave logits that are not finite ({value}): the weights are damaged, or a value left "
            "the range of its type; compare the bundle's checksums with `vlmexport inspect --check`"
        )
