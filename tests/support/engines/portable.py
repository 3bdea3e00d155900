"""The portable lowering behind the engine interface: lowered graphs on ONNX Runtime, new rows appended in numpy.

To whoever binds calls it is an engine like any other: masks, `write_indices` and updated caches are as the manifest has them.
What a call does around a lowered graph is what an engine over portable plans does around a plan.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from vlmexport.exporter.lowering import new_name
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.engines import kv_append
from vlmexport.runtime.engines.base import DTYPES, Buffer, Call, Engine, View
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu
from vlmexport.runtime.graphs.values import CONV_SLOTS

from tests.support import lowered_runs
from tests.support.onnx_session import onnx_session

from . import memory


class _Lowered(OnnxRuntimeCpu):
    """ONNX Runtime on the lowered copies of a bundle's graphs, which are made when they are first bound."""

    def __init__(self, folder: Path, manifest: Manifest, scratch: Path) -> None:
        super().__init__(folder, manifest)
        self._scratch = scratch

    def _load(self, graph: str) -> ort.InferenceSession:
        return onnx_session(lowered_runs.lowered_file(self._folder, self.graphs[graph].file, self._scratch))


class Portable(Engine):
    """See the module. Lowered graphs lie beside the bundle's folder while the engine lives."""

    name = "portable"

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(as_float32(manifest).graphs)
        self._scratch = tempfile.TemporaryDirectory(prefix="lowered-", dir=folder.parent)
        self._lowered = _Lowered(folder, manifest, Path(self._scratch.name))

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        return memory.allocate(name, nbytes, zeroed)

    def write(self, view: View, array: np.ndarray) -> None:
        memory.array(view)[...] = array

    def read(self, view: View) -> np.ndarray:
        return memory.array(view).copy()

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        caches = {name: view for name, view in inputs.items() if f"updated_{name}" in outputs}
        if not caches:
            return self._lowered._bind(graph, inputs, outputs)
        wholes = {name: inputs[name] for name in kv_append.NEW_MASKS if name in inputs}
        width = kv_append.pass_width(inputs)
        rows: dict[str, View] = {}
        for name, cache in caches.items():
            batch, heads, _, size = cache.shape
            rows[name] = self._own(f"{name}.new", (batch, heads, width, size), cache.dtype)
        given = {
            name: view
            for name, view in inputs.items()
            if name != "write_indices" or CONV_SLOTS in inputs  # a convolution's rows are old or new by it
        }
        masks: list[tuple[View, View, View]] = []
        for name, whole in wholes.items():
            before = self._own(f"{name}.before", whole.shape, whole.dtype)
            new = self._own(f"{name}.new", (*whole.shape[:3], width), whole.dtype)
            given |= {name: before, kv_append.NEW_MASKS[name]: new}
            masks.append((whole, before, new))
        made = {name: view for name, view in outputs.items() if not name.startswith("updated_")}
        made |= {new_name(f"updated_{name}"): view for name, view in rows.items()}
        call = self._lowered._bind(graph, given, made)
        return _Appending(
            call, inputs["write_indices"], masks, [(caches[name], rows[name]) for name in caches]
        )

    def _own(self, name: str, shape: tuple[int, ...], dtype: str) -> View:
        return self.allocate(name, int(np.prod(shape)) * DTYPES[dtype].itemsize).view(shape, dtype)


class _Appending:
    """A lowered graph between the split of its mask and the append of its rows."""

    def __init__(
        self,
        call: Call,
        starts: View,
        masks: Sequence[tuple[View, View, View]],
        rows: Sequence[tuple[View, View]],
    ) -> None:
        self._call, self._starts, self._masks, self._rows = call, starts, masks, rows

    def run(self) -> None:
        starts = memory.array(self._starts).tolist()
        for whole, before, new in self._masks:
            memory.array(before)[...], memory.array(new)[...] = kv_append.split_mask(
                memory.array(whole), starts
            )
        self._call.run()
        for cache, rows in self._rows:
            kv_append.append_kv(memory.array(cache), memory.array(rows), starts)
