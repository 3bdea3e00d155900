"""The `vision` graph: whatever inputs a family gives it, image embeddings come out. A draft's graph that reads
pictures runs the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ..common.errors import PromptError
from ..engines.base import DTYPES, Engine
from ..engines.buffers import HostBuffer


class Vision:
    """Runs `graph` once per mapping of inputs; buffers are kept, and replaced by larger ones when needed."""

    def __init__(self, engine: Engine, graph: str = "vision"):
        self._engine, self._graph = engine, graph
        self._buffers: dict[str, tuple[int, HostBuffer]] = {}

    def run(self, inputs: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Hidden states [n, E] of all runs, in order; each run gives [..., n, E]."""
        return np.concatenate([self._once(entry) for entry in inputs])

    def _once(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        engine, info = self._engine, self._engine.interface(self._graph)
        sizes: dict[str, int] = {}
        views = {}
        for value in info.inputs:
            array = np.asarray(arrays[value.name])
            for dimension, size in zip(value.shape, array.shape, strict=True):
                known = sizes.setdefault(dimension, size) if isinstance(dimension, str) else dimension
                if known != size:
                    raise PromptError(
                        f"image input {value.name} has shape {array.shape}, the model takes {value.shape}"
                    )
            buffer = self._buffer(value.name, array.size, value.dtype)
            buffer.host(array.shape)[...] = array
            buffer.push(array.shape)
            views[value.name] = buffer.view(array.shape)
        output = info.outputs[0]
        shape = tuple(size if isinstance(size, int) else sizes[size] for size in output.shape)
        image_embeds = self._buffer(output.name, prod(shape), output.dtype).view(shape)
        engine.bind(self._graph, views, {output.name: image_embeds}).run()
        return np.array(engine.read(image_embeds), DTYPES[output.dtype]).reshape(-1, shape[-1])

    def _buffer(self, name: str, size: int, dtype: str) -> HostBuffer:
        known = self._buffers.get(name)
        if known is None or known[0] < size:
            prefix = "" if self._graph == "vision" else f"{self._graph}."
            known = self._buffers[name] = (size, HostBuffer(self._engine, prefix + name, size, dtype))
        return known[1]
