"""ONNX Runtime on a CPU, whose numbers depend on how wide a pass is, as those of a GPU's kernels do, but far more."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from vlmexport.runtime.engines.base import Call, View
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu

NOISE = 0.2
"""Of a value: random models have few near ties, and every one of their tokens should depend on the width."""


class WidthDependent(OnnxRuntimeCpu):
    """What segments and the head give is multiplied by noise that is a function of the shape: of width and bound cache, or of
    the number of rows. Every row of a pass gets the same, wherever it lies; a batch is no part of it."""

    name = "width-dependent"
    rows_of_heads = True
    """Whether a head's rows count: of a batch they are more than its width."""

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        call = super()._bind(graph, inputs, outputs)
        if graph.startswith("segment."):
            cache = next(view for name, view in inputs.items() if name.startswith("key_cache."))
            view, shape = outputs["hidden_out"], (inputs["hidden"].shape[1], cache.shape[2])
        elif graph == "head" and "logits" in outputs and self.rows_of_heads:
            view = outputs["logits"]
            shape = (view.shape[0],)
        else:
            return call
        return Noisy(self, call, view, f"{graph} {shape}")


class Noisy:
    """A call whose result `view` is multiplied by noise, the same whenever `what` is."""

    def __init__(self, engine: OnnxRuntimeCpu, call: Call, view: View, what: str) -> None:
        self._call, self._values = call, engine.read(view)
        rng = np.random.default_rng(zlib.crc32(what.encode()))
        self._factors = (1 + NOISE * rng.standard_normal(view.shape[-1])).astype(np.float32)

    def run(self) -> None:
        self._call.run()
        self._values *= self._factors
