"""ONNX Runtime's CUDA provider: the graphs of a bundle in its types, on buffers that stay on the GPU.

Where heads of queries share key/value heads the folded form of a graph is loaded, if the bundle has it: the provider would
repeat keys and values over the whole bound cache, and has no fused attention for such groups in float32.

Caches are updated in place: inputs and outputs are bound by address, and the provider's cache update writes where it reads
when both are one. Calls are put into the engine's stream one by one, and none of them waits. ONNX Runtime captures single
graphs only: each call of a program is captured by itself, and costs one launch.
"""

from __future__ import annotations

import io
import logging
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnxruntime as ort

from ..bundle.manifest import GraphInfo
from ..bundle.operators import refuse
from ..common.errors import DeviceError
from ..common.foreign_errors import raise_if_foreign
from ..graphs.on_device import CHANGING
from ..graphs.registry import graph_role
from .argmax import ANSWERS, FILE, answers, places
from .base import Call, Program, Reading, View, unwatched
from .calls import BoundCalls
from .cuda import Cuda
from .device import DeviceEngine, Steps
from .onnxruntime import check_interface, failure, filled_binding, session_options
from .out_of_memory import LESS_ON_A_GPU

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest

log = logging.getLogger(__name__)

PROVIDER = "CUDAExecutionProvider"

REMEDY = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
"""The provider with the libraries of CUDA and cuDNN that it was made with."""

FATAL = 4
"""A level of ONNX Runtime's log. What it says below that, it says on stderr: what matters of it becomes our one line."""

GRAPH_ID, NEVER = "gpu_graph_id", "-1"
"""Of a run: the number of what is captured, or that nothing is. A run that does not say is captured under one number."""


class OnnxRuntimeCuda(DeviceEngine):
    """`Engine` on the CUDA provider. It computes and caches in the types of the bundle, without TF32. Graphs are loaded
    when first bound, or by `load`.

    The head offers `best` and `finite`, by a graph of this engine behind the bundle's (`argmax.py`).
    """

    name = "onnxruntime-cuda"
    version = ort.__version__
    captures = False
    place: ClassVar[str] = "cuda"
    """What ONNX Runtime calls the memory that is bound."""

    def __init__(self, folder: Path, manifest: Manifest, cuda: Cuda, reading: Reading = unwatched):
        super().__init__(manifest.graphs, cuda)
        self._folder, self._reading = Path(folder), reading
        self._weights = (manifest.weights.file, *manifest.weights.linked)
        self._interfaces = {
            name: answers(info) if info.role in ("head", *CHANGING) else info
            for name, info in self.graphs.items()
        }
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._calls = BoundCalls(self.synchronise)  # a call that is dropped may still be at work
        self._bound: weakref.WeakSet[_BoundCall] = weakref.WeakSet()
        self._regular = run_options(NEVER)
        self._captured = 0
        self.captures_calls = True
        """Whether calls of programs are captured; False from the first one on that ONNX Runtime cannot capture."""
        self._places: View | None = None

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, reading: Reading = unwatched) -> OnnxRuntimeCuda:
        """The engine for the GPU of this machine. Raises `DeviceError` without a GPU, its driver or the provider."""
        if PROVIDER not in ort.get_available_providers():
            raise DeviceError(
                f"ONNX Runtime {ort.__version__} has no {PROVIDER}: pip uninstall onnxruntime, then {REMEDY}"
            )
        ort.set_default_logger_severity(FATAL)
        preload()
        return cls(folder, manifest, Cuda.open(), reading)

    def providers(self, captures: bool) -> list[Any]:
        """What a session is made with: this engine's stream, and products as exact as the types are; with `captures` runs
        of it may be captured."""
        options = {"device_id": "0", "use_tf32": "0", "user_compute_stream": str(self.stream)}
        return [(PROVIDER, options | ({"enable_cuda_graph": "1"} if captures else {}))]

    def interface(self, graph: str) -> GraphInfo:
        return self._interfaces.get(graph) or super().interface(graph)

    def load(self, *graphs: str) -> None:
        for graph in graphs:
            self._session(graph)

    def program(self, calls: Sequence[Call], upload: View, download: View) -> Program:
        return super().program(self.repeated(calls), upload, download)

    def repeated(self, calls: Sequence[Call]) -> Sequence[Call]:
        for call in calls:
            for step in call.steps if isinstance(call, Steps) else (call,):
                if isinstance(step, _BoundCall) and step.repeatable and step.captured is None:
                    self._captured += 1
                    step.captured = run_options(str(self._captured))
                    release = getattr(step.session, "release_captured_graph", None)
                    if release is not None:  # since ONNX Runtime 1.31
                        self._resources.hold(step, release, self._captured)
        return calls

    def drop(self) -> None:
        for call in list(self._bound):  # a program that somebody holds has calls, too
            call.forget()
        self._calls.clear()
        self._sessions.clear()
        self._places = None

    # --- calls ---

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        return self._calls.get(graph, inputs, outputs, self._new_call)

    def _new_call(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        answers = {name: outputs[name] for name in ANSWERS if name in outputs}
        if not answers:
            return self._bound_call(graph, inputs, outputs)
        (num_logits,) = next(iter(answers.values())).shape
        vocabulary = next(int(each.shape[1]) for each in self.graphs[graph].outputs if each.name == "logits")
        graph_outputs = {name: view for name, view in outputs.items() if name not in ANSWERS}
        logits = graph_outputs.setdefault(
            "logits", self.passing("logits", (num_logits, vocabulary), "float32")
        )
        if self._places is None:
            self._places = self.constant("answers.places", places(vocabulary))
        for name, dtype in ANSWERS.items():
            answers.setdefault(name, self.passing(f"answers.{name}", (num_logits,), dtype))
        judged = self._bound_call(FILE, {"logits": logits, "places": self._places}, answers)
        return Steps([self._bound_call(graph, inputs, graph_outputs), judged])

    def _bound_call(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> _BoundCall:
        session, file = self._session(graph), self._file(graph)
        binding = filled_binding(session, file, self.place, inputs, outputs)
        call = _BoundCall(
            self, graph, file, session, binding, self._regular, (*inputs.values(), *outputs.values())
        )
        self._bound.add(call)
        return call

    def repeatable(self, graph: str) -> bool:
        """Whether a graph may be run once more than it is asked for: ONNX Runtime runs one several times before it has captured
        it."""
        return graph == FILE or graph_role(self.graphs[graph].role).captures

    # --- sessions ---

    def _file(self, graph: str) -> str:
        """The name of what is loaded for a graph."""
        if graph == FILE:
            return FILE
        info = super().interface(graph)
        return info.folded or info.file

    def _session(self, graph: str) -> ort.InferenceSession:
        session = self._sessions.get(graph)
        if session is None:
            begin = time.perf_counter()
            if graph == FILE:
                path = Path(__file__).with_name(FILE)
                session = self._loaded(graph, path)
            else:
                path = self._folder / self._file(graph)
                with self._reading(path.name, *self._weights):
                    refuse(path)
                    session = self._loaded(graph, path)
            self._sessions[graph] = session
            if graph != FILE:
                check_interface(graph, self.graphs[graph], session)
            log.debug("loaded %s in %.2f s", path.name, time.perf_counter() - begin)
        return session

    def _loaded(self, graph: str, path: Path) -> ort.InferenceSession:
        """A session, one that can capture where the graph may be captured and ONNX Runtime agrees."""
        if self.captures_calls and self.repeatable(graph):
            try:
                return self.open_session(path, captures=True)
            except DeviceError:
                raise
            except Exception as error:  # for instance a node that the provider leaves to the CPU
                raise_if_foreign(error)
                log.debug("%s is not captured: %s", path.name, error)
        try:
            return self.open_session(path, captures=False)
        except DeviceError:
            raise
        except Exception as error:  # ONNX Runtime raises many types, none of them ours
            raise_if_foreign(error)
            raise failure("load", path.name, error, LESS_ON_A_GPU) from error

    def open_session(self, path: Path, captures: bool) -> ort.InferenceSession:
        """ONNX Runtime's session of a file. Raises what ONNX Runtime raises, and `DeviceError` where it would compute on the
        CPU instead: it does that without a word when a library of the provider is missing."""
        session = ort.InferenceSession(
            str(path), session_options(pooled=False), providers=self.providers(captures), enable_fallback=0
        )
        if PROVIDER not in session.get_providers():
            raise DeviceError(
                f"ONNX Runtime {ort.__version__} cannot load its {PROVIDER}: libraries of CUDA or cuDNN are missing; {REMEDY}"
            )
        return session

    def give_up_capturing(self, file: str, error: Exception) -> None:
        """ONNX Runtime could not capture a call: none is captured from now on, and what it began is ended."""
        log.warning("%s cannot be captured, calls are put into the stream one by one: %s", file, error)
        self.captures_calls = False
        with suppress(DeviceError):  # it may not have begun
            self.cuda.free_captured(self.cuda.end_capture(self.stream))


def preload() -> None:
    """Load the CUDA libraries of pip's packages, where ONNX Runtime's provider does not look. What is missing is said when a
    session is made: not all of it is needed."""
    load = getattr(ort, "preload_dlls", None)  # since ONNX Runtime 1.21
    if load is None:
        return
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load()
        except Exception as error:  # a help, not a condition
            raise_if_foreign(error)
            output.write(str(error))
    if output.getvalue():
        log.debug("CUDA libraries: %s", " ".join(output.getvalue().split()))


def run_options(number: str) -> ort.RunOptions:
    """Of runs that do not wait, captured under `number`."""
    options = ort.RunOptions()
    # `read` is the only call that waits.
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    options.add_run_config_entry(GRAPH_ID, number)
    return options


class _BoundCall:
    """A session and its filled binding. `keep` holds what lies at the addresses; `captured`: options of a run that is
    captured, once a program asked for that."""

    __slots__ = (
        "__weakref__", "_binding", "_engine", "_file", "_keep", "_ran", "_regular", "captured", "repeatable", "session",
    )  # fmt: skip

    def __init__(
        self,
        engine: OnnxRuntimeCuda,
        graph: str,
        file: str,
        session: Any,
        binding: Any,
        regular: ort.RunOptions,
        keep: tuple[View, ...],
    ):
        self._engine, self._file = engine, file
        self.session: Any = session
        self._binding: Any = binding
        self._regular, self._keep = regular, keep
        self.repeatable = engine.repeatable(graph)
        self.captured: ort.RunOptions | None = None
        self._ran = False

    def forget(self) -> None:
        """Let go of the session, which works in a stream that is about to go. The call is not run again."""
        self.session = self._binding = None

    def run(self) -> None:
        captured = self.captured if self._engine.captures_calls else None
        try:
            self.session.run_with_iobinding(self._binding, captured or self._regular)
        except Exception as error:  # ONNX Runtime raises many types, none of them ours
            raise_if_foreign(error)
            if captured is None or self._ran:
                raise failure("run", self._file, error, LESS_ON_A_GPU) from error
            self._engine.give_up_capturing(self._file, error)
            self.run()
        self._ran = self._ran or captured is not None
