"""What computes the graphs of plans that are none: ONNX Runtime, or numpy where that must not be imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import ml_dtypes
import numpy as np
import onnx

DTYPES: dict[int, Any] = {
    onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.FLOAT16: np.float16, onnx.TensorProto.INT64: np.int64,
    onnx.TensorProto.INT32: np.int32, onnx.TensorProto.BOOL: np.bool_, onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16,
}  # fmt: skip
"""ONNX type → numpy's."""


@dataclass(frozen=True)
class Place:
    """Where a value of a bound call lies: `memory` are its bytes at `address`."""

    kind: int
    shape: tuple[int, ...]
    address: int
    memory: np.ndarray

    def array(self) -> np.ndarray:
        """The value itself, not a copy."""
        return self.memory.view(DTYPES[self.kind]).reshape(self.shape)


Runs = Callable[[bytes], "Plan"]
"""Of a serialised graph."""


class Plan(Protocol):
    """A graph that is ready to be bound."""

    def bind(self, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> Callable[[], None]:
        """A call that reads and writes these places."""
        ...


class ByOnnxRuntime:
    """On memory as it lies, in place where an output lies at its input."""

    def __init__(self, data: bytes) -> None:
        from tests.support.onnx_session import onnx_session

        self._session = onnx_session(data)

    def bind(self, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> Callable[[], None]:
        binding = self._session.io_binding()
        for places, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
            for name, place in places.items():
                kind = (
                    int(place.kind) if place.kind == onnx.TensorProto.BFLOAT16 else DTYPES[place.kind]
                )  # numpy has no name for it
                bind(name, "cpu", 0, kind, place.shape, place.address)
        return lambda: self._session.run_with_iobinding(binding)


class ByNumpy:
    """By the reference implementation of ONNX, which is slow and needs neither ONNX Runtime nor torch."""

    ran: ClassVar[int] = 0
    """Graphs that were computed so far in this process."""

    def __init__(self, data: bytes) -> None:
        from onnx.reference import ReferenceEvaluator

        self._evaluator = ReferenceEvaluator(onnx.load_from_string(data))

    def bind(self, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> Callable[[], None]:
        def run() -> None:
            names = list(outputs)
            # Copies: what lies where an input does is written when everything was computed.
            found = self._evaluator.run(names, {name: place.array().copy() for name, place in inputs.items()})
            for name, value in zip(names, found, strict=True):
                place = outputs[name]
                made = np.asarray(value)
                assert made.shape == place.shape and made.dtype == place.array().dtype, (
                    f"{name} is {made.dtype} {made.shape}, bound as {place.array().dtype} {place.shape}"
                )
                place.array()[...] = made
            type(self).ran += 1

        return run
