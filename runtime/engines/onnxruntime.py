"""ONNX Runtime on a CPU: prebound calls on fixed buffers, one thread pool for the whole process."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from ..bundle.float32_view import as_float32
from ..bundle.operators import refuse
from ..common.cpu_count import cores
from ..common.errors import BundleError, CapacityError, OptionError
from ..common.foreign_errors import raise_if_foreign
from .base import DTYPES, Buffer, Call, Engine, Reading, View, dtype_name, unwatched
from .calls import BoundCalls
from .out_of_memory import LESS, out_of_memory

if TYPE_CHECKING:
    from ..bundle.manifest import GraphInfo, Manifest, ValueInfo

log = logging.getLogger(__name__)

SINGLE_THREAD_BYTES = 32 << 20
"""Bundles with fewer bytes of weights run on the caller's thread unless `threads` is given."""

MOST_THREADS = 16
"""Threads that may be asked for on any machine: far more than it has cores wait for each other without end."""

_ALIGNMENT = 64
ELEMENT_TYPES: dict[str, Any] = {**{name: dtype.type for name, dtype in DTYPES.items()}, "bfloat16": 16}
"""dtype name → what ONNX Runtime binds a value as."""

_TYPE_NAMES = {f"tensor({name})": name for name in DTYPES} | {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
}

_pool_threads: int | None = None


def use_global_pool(threads: int | None = None) -> int:
    """Create the one thread pool that every session of this process uses; returns its size.

    Sessions with pools of their own make each other wait (1.7 to 1.9 times slower with two on two cores).
    The size is fixed by the first call; another explicit size later raises `OptionError`.
    """
    global _pool_threads
    most = max(MOST_THREADS, cores())
    if threads is not None and (type(threads) is not int or not 1 <= threads <= most):
        raise OptionError(f"threads: {threads!r} is not an integer in 1..{most}")
    if _pool_threads is None:
        pool_size = threads or cores()
        try:
            ort.set_global_thread_pool_sizes(pool_size, 1)
        except Exception as error:  # the pool belongs to other code in this process
            raise_if_foreign(error)
            if threads is not None:
                raise OptionError(
                    f"threads: {threads} cannot be set, other code in this process already created "
                    "ONNX Runtime's thread pool"
                ) from error
        _pool_threads = pool_size
    elif threads is not None and threads != _pool_threads:
        raise OptionError(f"threads: {threads} asked for, but this process already uses {_pool_threads}")
    return _pool_threads


class _BoundCall:
    """A session and its filled IOBinding. `keep` holds the buffers behind the bound addresses.

    `InferenceSession.run_with_iobinding` checks that binding and session belong together, and the rules of captures
    on WebGPU, before every run. Both are settled here, so the method of the C++ session behind it is called at once:
    it is the same call with the same errors (`capi/onnxruntime_inference_collection.py` of ONNX Runtime 1.31).
    """

    __slots__ = ("_binding", "_engine", "_file", "_keep", "_run")

    def __init__(
        self,
        engine: OnnxRuntimeCpu,
        file: str,
        session: ort.InferenceSession,
        binding: ort.IOBinding,
        keep: tuple[Buffer, ...],
    ):
        self._engine, self._file, self._keep = engine, file, (session, binding, keep)
        inner: Any = getattr(session, "_sess", None)
        bound = getattr(binding, "_iobinding", None)
        if inner is None or bound is None:  # another layout of ONNX Runtime's Python package
            self._run, self._binding = lambda given, _: session.run_with_iobinding(given), binding
        else:
            self._run, self._binding = inner.run_with_iobinding, bound

    def run(self) -> None:
        begin = time.perf_counter()
        try:
            self._run(self._binding, None)
        except Exception as error:  # ONNX Runtime raises many types, none of them ours
            raise_if_foreign(error)
            raise failure("run", self._file, error) from error
        self._engine.busy += time.perf_counter() - begin


class OnnxRuntimeCpu(Engine):
    """`Engine` on ONNX Runtime's CPU provider. Graphs are loaded when first bound, or by `load`.

    It computes and caches in float32: weights of another type are cast when a graph is loaded (`widened`). Of a bundle with
    `target_weights` it loads the folded form of a graph that has one: the Attention of ONNX Runtime adds in another order
    where a key/value head has one row of queries, and rounding of rows to 8 bits makes whole steps of that.

    Weights stay single: ONNX Runtime maps `weights.bin`, repacks each matrix once for its kernels and lets the
    mapped pages go; no two graphs of a bundle hold the same matrix.
    """

    name = "onnxruntime-cpu"
    version = ort.__version__
    host_memory = True

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        threads: int | None = None,
        reading: Reading = unwatched,
        *,
        float_weights: bool = False,
    ):
        """`float_weights`: integers become float32 when they are loaded (`fold_integers`)."""
        super().__init__(_graphs(manifest))
        self._folder, self._reading = Path(folder), reading
        self._weights = (manifest.weights.file, *manifest.weights.linked)
        if manifest.weights_dtype != "float32":
            self.note = (
                f"{manifest.weights_dtype} weights become float32 when they are loaded: this engine computes and caches "
                "in float32"
            )
        # Handing out parts of a small matrix takes longer than multiplying it: a 17 MB model is as fast on one
        # thread as on two, and does not stumble when other programs take a core.
        self._pooled = threads is not None or manifest.weights.total >= SINGLE_THREAD_BYTES
        self.threads = use_global_pool(threads) if self._pooled else 1
        self._float_weights = float_weights
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._calls = BoundCalls()

    def load(self, *graphs: str) -> None:
        """Load graphs now instead of at their first use. Raises `BundleError` for what cannot be loaded."""
        for graph in graphs:
            self._session(graph)

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        try:
            raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        except MemoryError:
            raise CapacityError(f"no memory for {name!r} ({nbytes / 1e9:.1f} GB); {LESS}") from None
        start = -raw.ctypes.data % _ALIGNMENT
        data = raw[start : start + nbytes]
        return Buffer(name, nbytes, data.ctypes.data, data)

    def constant(self, name: str, array: np.ndarray) -> View:
        flat = np.ascontiguousarray(array).reshape(-1)
        data = flat.view(np.uint8)
        return Buffer(name, data.nbytes, data.ctypes.data, data).view(array.shape, dtype_name(flat))

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        return self._calls.get(graph, inputs, outputs, self._bound_call)

    def _bound_call(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        session, file = self._session(graph), self.graphs[graph].file
        binding = filled_binding(session, file, "cpu", inputs, outputs)
        keep = tuple(view.buffer for view in (*inputs.values(), *outputs.values()))
        return _BoundCall(self, file, session, binding, keep)

    def write(self, view: View, array: np.ndarray) -> None:
        np.copyto(self.read(view), array)

    def read(self, view: View) -> np.ndarray:
        dtype = DTYPES[view.dtype]
        start = view.offset * dtype.itemsize
        return view.buffer.data[start : start + view.nbytes].view(dtype).reshape(view.shape)

    def close(self) -> None:
        """Drop every session and bound call."""
        self._calls.clear()
        self._sessions.clear()

    def _session(self, graph: str) -> ort.InferenceSession:
        session = self._sessions.get(graph)
        if session is None:
            with self._reading(self.interface(graph).file, *self._weights):
                session = self._load(graph)
            self._sessions[graph] = session
        return session

    def _load(self, graph: str) -> ort.InferenceSession:
        info, begin = self.interface(graph), time.perf_counter()
        refuse(self._folder / info.file)
        options = session_options(self._pooled)
        if self._float_weights:
            fold_integers(options)
        try:
            session = ort.InferenceSession(
                str(self._folder / info.file),
                options,
                providers=["CPUExecutionProvider"],
                enable_fallback=0,  # it would print, drop what a signal handler raises, and try the same again
            )
        except Exception as error:
            raise_if_foreign(error)
            raise failure("load", info.file, error) from error
        check_interface(graph, info, session)
        log.debug("loaded %s in %.2f s", info.file, time.perf_counter() - begin)
        return session


def _graphs(manifest: Manifest) -> dict[str, GraphInfo]:
    """Name → what is loaded for it."""
    graphs = as_float32(manifest).graphs
    if manifest.target_weights is None:
        return graphs
    return {name: replace(info, file=info.folded or info.file) for name, info in graphs.items()}


def check_interface(graph: str, info: GraphInfo, session: ort.InferenceSession) -> None:
    """Raise `BundleError` unless a session's inputs and outputs are those of the manifest's `info`."""
    for kind, declared, offered in (
        ("inputs", info.inputs, session.get_inputs()),
        ("outputs", info.outputs, session.get_outputs()),
    ):
        expected, actual = (
            {value.name: value for value in declared},
            {value.name: value for value in offered},
        )
        odd = sorted(set(expected) ^ set(actual)) or [
            name for name, value in expected.items() if not _same_kind(value, actual[name])
        ]
        if odd:
            raise BundleError(
                f"{info.file}: {kind} differ from manifest field 'graphs.{graph}.{kind}': {', '.join(odd[:4])}"
                f"{', …' if len(odd) > 4 else ''}; build the bundle again"
            )


def filled_binding(
    session: ort.InferenceSession,
    file: str,
    place: str,
    inputs: Mapping[str, View],
    outputs: Mapping[str, View],
) -> ort.IOBinding:
    """Inputs and outputs of `session` by address, in the memory that ONNX Runtime calls `place`. Raises `BundleError`."""
    binding = session.io_binding()
    try:
        for bind, views in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, view in views.items():
                bind(name, place, 0, ELEMENT_TYPES[view.dtype], list(view.shape), view.address)
    except Exception as error:  # ONNX Runtime raises many types, none of them ours
        raise_if_foreign(error)
        raise failure("bind", file, error) from error
    return binding


def failure(step: str, file: str, error: Exception, less: str = LESS) -> BundleError | CapacityError:
    """What ONNX Runtime says when it cannot `step` a file; `less` is what helps where there is no memory for it."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, MemoryError) or out_of_memory(str(error)):
        return CapacityError(f"ONNX Runtime has no memory to {step} {file}: {reason:.200}; {less}")
    return BundleError(
        f"ONNX Runtime cannot {step} {file}: {reason}; build the bundle again with `vlmexport build`"
    )


def _same_kind(declared: ValueInfo, actual: Any) -> bool:
    """Whether dtype, rank and fixed dimensions of a graph's value are as declared."""
    shape = list(actual.shape)
    return _TYPE_NAMES.get(actual.type) == declared.dtype and (
        len(shape) == len(declared.shape)
        and all(
            have == want
            for have, want in zip(shape, declared.shape, strict=True)
            if isinstance(have, int) or isinstance(want, int)
        )
    )


def fold_integers(options: ort.SessionOptions) -> None:
    """Lets integer weights become float32 when a graph is loaded, as PyTorch has them in a reference: ONNX Runtime's own
    products with integers round the hidden states before them to 8 bits, too."""
    options.add_session_config_entry("session.disable_quant_qdq", "1")


def session_options(pooled: bool) -> ort.SessionOptions:
    """Of any provider; `pooled`: with the process's one pool of threads."""
    options = ort.SessionOptions()
    pooled = (
        pooled or _pool_threads is not None
    )  # once there is one (another bundle's), sessions without it are refused
    options.use_per_session_threads = not pooled
    if not pooled:
        options.intra_op_num_threads = 1  # no pool at all
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    # ONNX Runtime logs to stderr what it also raises; what it raises becomes our one line.
    options.log_severity_level = 4
    # A file called x.ort would be read as ONNX Runtime's own format, which nobody checked.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # Memory patterns are cached per input shape: with a mask that grows, memory would grow with them.
    options.enable_mem_pattern = False
    # Weights bypass the arena, whose chunks grow by doubling: they take their own size and no more.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    return options
