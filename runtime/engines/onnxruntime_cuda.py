"""ONNX Runtime's CUDA provider: the graphs of a bundle as they are, on buffers that stay on the GPU.

Caches are updated in place: inputs and outputs are bound by address, and the provider's cache update writes where it reads
when both are one. Calls are put into the engine's stream one by one; ONNX Runtime captures single graphs only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnxruntime as ort

from ..bundle.operators import refuse
from ..errors import DeviceError
from .base import Call, View
from .calls import BoundCalls
from .cuda import Cuda
from .device import DeviceEngine
from .onnxruntime import check_interface, failure, filled_binding, session_options

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest

log = logging.getLogger(__name__)

PROVIDER = "CUDAExecutionProvider"


class OnnxRuntimeCuda(DeviceEngine):
    """`Engine` on the CUDA provider. It computes and caches in the types of the bundle, without TF32. Graphs are loaded
    when first bound, or by `load`."""

    name = "onnxruntime-cuda"
    captures = False
    place: ClassVar[str] = "cuda"
    """What ONNX Runtime calls the memory that is bound."""

    def __init__(self, folder: Path, manifest: Manifest, cuda: Cuda):
        super().__init__(manifest.graphs, cuda)
        self._folder = Path(folder)
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._calls = BoundCalls(self.synchronise)  # a call that is dropped may still be at work
        self._options = ort.RunOptions()
        # `read` is the only call that waits.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    @classmethod
    def open(cls, folder: Path, manifest: Manifest) -> OnnxRuntimeCuda:
        """The engine for the GPU of this machine. Raises `DeviceError` without a GPU, its driver or the provider."""
        if PROVIDER not in ort.get_available_providers():
            raise DeviceError(
                f"ONNX Runtime {ort.__version__} has no {PROVIDER}: pip uninstall onnxruntime, then "
                "pip install onnxruntime-gpu"
            )
        return cls(folder, manifest, Cuda.open())

    def providers(self) -> list[Any]:
        """What a session is made with: this engine's stream, and products as exact as the types are."""
        return [(PROVIDER, {"device_id": "0", "use_tf32": "0", "user_compute_stream": str(self.stream)})]

    def load(self, *graphs: str) -> None:
        for graph in graphs:
            self._session(graph)

    def close(self) -> None:
        if self.stream:
            self.synchronise()
        self._calls.clear()
        self._sessions.clear()
        super().close()

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        return self._calls.get(graph, inputs, outputs, self._bound_call)

    def _bound_call(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        session, file = self._session(graph), self.graphs[graph].file
        binding = filled_binding(session, file, self.place, inputs, outputs)
        return _BoundCall(file, session, binding, self._options, (*inputs.values(), *outputs.values()))

    def _session(self, graph: str) -> ort.InferenceSession:
        session = self._sessions.get(graph)
        if session is None:
            info, begin = self.interface(graph), time.perf_counter()
            path = self._folder / info.file
            refuse(path)
            try:
                session = ort.InferenceSession(
                    str(path), session_options(pooled=False), providers=self.providers()
                )
            except Exception as error:
                raise failure("load", info.file, error) from error
            check_interface(graph, info, session)
            log.debug("loaded %s in %.2f s", info.file, time.perf_counter() - begin)
            self._sessions[graph] = session
        return session


class _BoundCall:
    """A session and its filled binding. `keep` holds what lies at the addresses."""

    __slots__ = ("_binding", "_file", "_keep", "_options", "_session")

    def __init__(
        self,
        file: str,
        session: ort.InferenceSession,
        binding: ort.IOBinding,
        options: ort.RunOptions,
        keep: tuple[View, ...],
    ):
        self._file, self._session, self._binding = file, session, binding
        self._options, self._keep = options, keep

    def run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # ONNX Runtime raises many types, none of them ours
            raise failure("run", self._file, error) from error
