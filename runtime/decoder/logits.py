"""What the target says after the hidden states of a pass: its best token and its logits, read no earlier than needed."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan

import numpy as np

from ..common.errors import NumericsError
from ..engines.base import DTYPES, Call, Engine, View


class TargetLogits:
    """The target's norm and LM head bound to hidden states at fixed places. Results are valid until a head that shares
    its outputs runs.

    On an engine in host memory the logits are read in place and `best` is their argmax. Elsewhere a head that offers
    `best` (int64 [num_logits]) and `finite` (bool [num_logits]) saves the way of the logits: they are read when asked
    for. The two lie in one buffer, so that one read, which is one wait, brings both.
    """

    __slots__ = (
        "_answers",
        "_call",
        "_engine",
        "_graph",
        "_host",
        "_logits",
        "_logits_by_row",
        "_small",
        "_whole",
    )

    def __init__(self, engine: Engine, call: Call, outputs: Mapping[str, View], graph: str = "head"):
        """`outputs` of `call`: `logits` float32 [num_logits, V], and `best` and `finite` in one buffer where the engine
        has them. `graph` is named where logits are not finite."""
        self._engine, self._call, self._graph, self._logits = engine, call, graph, outputs["logits"]
        self._host = engine.host_memory
        self._small = {name: view for name, view in outputs.items() if name != "logits"}
        self._whole: View | None = None
        if self._small and not self._host:
            buffer = next(iter(self._small.values())).buffer
            end = max(view.address + view.nbytes for view in self._small.values()) - buffer.address
            assert all(view.buffer is buffer for view in self._small.values()), "one read brings all of them"
            self._whole = buffer.view((end,), "uint8")
        self._logits_by_row: list[np.ndarray] | None = list(engine.read(self._logits)) if self._host else None
        """Logits [V] by index, once they are read."""
        self._answers: dict[str, np.ndarray] | None = None
        """What else the head offers, once it is read."""

    def run(self) -> TargetLogits:
        """Run the head over what lies there now, and forget what was read. Returns itself."""
        self._call.run()
        if not self._host:
            self._logits_by_row = self._answers = None
        return self

    def best(self, logits_index: int) -> int:
        """The most likely token after `logits_index`, the lowest id among equals. Raises `NumericsError` for NaN or
        infinity."""
        logits = self._logits_by_row
        if logits is None:
            if "best" in self._small:
                self.check(logits_index)
                return int(self._read_small("best")[logits_index])
            logits = self._read()
        values = logits[logits_index]
        token = values.argmax().item()
        # NaN and +inf win every comparison, and −inf wins only where nothing else is: one value tells.
        if not isfinite(values.item(token)):
            raise self._not_finite(values.item(token))
        return token

    def logits(self, logits_index: int) -> np.ndarray:
        """Logits [V] after `logits_index`, float32; not to be written."""
        return self._read()[logits_index]

    def finite(self, logits_index: int) -> bool:
        """Whether there is a best token: no NaN, no +inf, not −inf everywhere."""
        if self._logits_by_row is None and "finite" in self._small:
            return bool(self._read_small("finite")[logits_index])
        values = self.logits(logits_index)
        return isfinite(values.item(int(values.argmax())))

    def check(self, logits_index: int) -> None:
        """Raise `NumericsError` unless `finite(logits_index)`."""
        if not self.finite(logits_index):
            raise self._not_finite(nan)

    def _read(self) -> list[np.ndarray]:
        if self._logits_by_row is None:
            self._logits_by_row = list(self._engine.read(self._logits))
        return self._logits_by_row

    def _read_small(self, name: str) -> np.ndarray:
        if self._answers is None:
            assert self._whole is not None
            data = self._engine.read(self._whole)
            self._answers = {}
            for each, view in self._small.items():
                start = view.address - view.buffer.address
                self._answers[each] = data[start : start + view.nbytes].view(DTYPES[view.dtype])
        return self._answers[name]

    def _not_finite(self, value: float) -> NumericsError:
        return not_finite(self._graph, value)


class ArgmaxResult:
    """What the target says after the nodes of a cycle on a device: their best tokens, without logits."""

    def __init__(self, best: np.ndarray, finite: np.ndarray):
        """`best` int64 [nodes], `finite` bool [nodes]."""
        self._best, self._finite = best.tolist(), finite

    def best(self, logits_index: int) -> int:
        """The most likely token after a node. Raises `NumericsError` for logits that are not finite."""
        if not self._finite[logits_index]:
            raise not_finite("head", nan)
        return self._best[logits_index]


def not_finite(graph: str, value: float) -> NumericsError:
    """The error of a request whose numbers, which `graph` gave, are not finite."""
    return NumericsError(
        f"graph {graph} gave logits that are not finite ({value}): the weights are damaged, or a value left "
        "the range of its type; compare the bundle's checksums with `vlmexport inspect --check`"
    )
