"""ONNX Runtime on a CPU, whose numbers differ in passes of few rows, as those of integer kernels do, but far more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmexport.runtime.engines.base import Call, View
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu

from tests.support.engines.width_dependent import Noisy


class NarrowRounding(OnnxRuntimeCpu):
    """What segments give of fewer than `least` rows per sequence, and the head of fewer than `least_rows`, is multiplied by
    noise that is a function of the number of rows."""

    name = "narrow-rounding"

    def __init__(self, *args: Any, least: int = 2, least_rows: int | None = None) -> None:
        super().__init__(*args)
        self._least, self._least_rows = least, least if least_rows is None else least_rows

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        call = super()._bind(graph, inputs, outputs)
        if graph.startswith("segment."):
            view, rows, least = outputs["hidden_out"], inputs["hidden"].shape[1], self._least
        elif graph == "head" and "logits" in outputs:
            view, least = outputs["logits"], self._least_rows
            rows = view.shape[0]
        else:
            return call
        return call if rows >= least else Noisy(self, call, view, f"{graph} {rows}")
