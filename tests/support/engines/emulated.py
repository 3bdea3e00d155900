"""The engines on a GPU, as they are, on a CUDA and a TensorRT that are not there."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from vlmexport.exporter.tensorrt import PlanOptions, add_plans, api
from vlmexport.exporter.tensorrt.compile import link_files
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.plans import choose_plans
from vlmexport.runtime.engines.base import DTYPES, Call, View
from vlmexport.runtime.engines.onnxruntime import session_options
from vlmexport.runtime.engines.onnxruntime_cuda import OnnxRuntimeCuda
from vlmexport.runtime.engines.tensorrt import TensorRTEngine

from .device_memory import GARBAGE
from .fake_cuda import FakeCuda
from .fake_provider import FakeSession
from .fake_tensorrt import library
from .stream import Counts

TARGET = "sm87"


def with_plans(
    path: Path, manifest: Manifest, folder: Path, lowering: str = "native", lean: bool = False
) -> Bundle:
    """The bundle at `path` once more in `folder`, with float32 plans of its graphs by the exporter and a builder that is
    not there. Of a narrow bundle the graphs are those that compute in float32."""
    link_files(path, folder, manifest)
    bundle = Bundle(
        folder, replace(as_float32(manifest), weights_dtype="float32", plans=[], files=dict(manifest.files))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", library(FakeCuda()))
        patch.setattr(api, "local_architecture", lambda: TARGET)
        add_plans(bundle, PlanOptions("tensorrt", "native", "fp32", lowering, lean))
    return bundle


class Asked:
    """What a test asks of an engine on a CUDA that is not there."""

    name: str
    cuda: Any

    def renewed(self) -> Any:
        """An engine with nothing in its memory and its queue."""
        raise NotImplementedError

    @property
    def counts(self) -> Counts:
        """Waits, enqueues, launches and bytes so far."""
        return self.cuda.counts

    @property
    def allocations(self) -> int:
        """How many buffers were allocated so far."""
        return self.cuda.allocations

    def settle(self) -> None:
        """Do what is queued; not counted."""
        self.cuda.queue.drain()

    def spoil(self, cache: View, lengths: list[int]) -> None:
        """Queue this: the rows of `cache` [batch, heads, rows, D] from `lengths[b]` on are garbage."""

        def work() -> None:
            data = self.cuda.bytes_at(cache.address, cache.nbytes)
            values: np.ndarray = data.view(DTYPES[cache.dtype]).reshape(cache.shape)
            for sequence, length in enumerate(lengths):
                values[sequence, :, length:] = GARBAGE

        self.cuda.queue.queue.append(work)


class Emulated(Asked, TensorRTEngine):
    """The real engine of plans."""

    def __init__(self, bundle: Bundle, folder: Any = None) -> None:
        cuda = FakeCuda(TARGET)
        plans = choose_plans(bundle.manifest, bundle.path, TARGET, lambda backend: True)
        super().__init__(bundle, plans, library(cuda), cuda)  # type: ignore[arg-type]
        self._bundle_with_plans, self._folder = bundle, folder

    @classmethod
    def of(cls, path: Path, manifest: Manifest, lowering: str = "native") -> Emulated:
        """On plans that are made now, in a folder beside the bundle that lives as long as the engine."""
        folder = tempfile.TemporaryDirectory(prefix="plans-", dir=path.parent)
        return cls(with_plans(path, manifest, Path(folder.name), lowering), folder)

    def renewed(self) -> Emulated:
        """An engine with nothing in its memory and its queue, on the same plans."""
        return type(self)(self._bundle_with_plans, self._folder)

    def settle(self) -> None:
        """Do what is queued; not counted."""
        self.cuda.queue.drain()  # type: ignore[attr-defined]


class EmulatedCuda(Asked, OnnxRuntimeCuda):
    """The real engine of the CUDA provider, whose graphs another provider computes when the stream gets there."""

    place = "cpu"

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, as_float32(manifest), FakeCuda())  # type: ignore[arg-type]
        self._manifest = manifest
        self._opened: dict[Path, ort.InferenceSession] = {}

    def renewed(self) -> EmulatedCuda:
        """An engine with nothing in its memory and its queue, on the graphs that this one has loaded."""
        made = type(self)(self._folder, self._manifest)
        made._opened = self._opened
        return made

    def open_session(self, path: Path, captures: bool) -> Any:
        if path not in self._opened:
            self._opened[path] = ort.InferenceSession(
                str(path), session_options(pooled=False), providers=["CPUExecutionProvider"]
            )
        return FakeSession(self._opened[path], self.cuda, captures)

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        for view in (*inputs.values(), *outputs.values()):
            self.cuda.bytes_at(view.address, view.nbytes)
        return super()._bind(graph, inputs, outputs)
