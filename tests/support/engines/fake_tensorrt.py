"""A TensorRT that is not there: its builder keeps an ONNX file as a plan, its runtime runs that on ONNX Runtime, lazily; or,
for processes that have none, by numpy (`plan_runs.py`).

Of NVIDIA's API there is what the exporter and the engine call, with the rules that it states: addresses are aligned and all
set, aliased outputs lie where their inputs do, shapes are inside a profile, who brings the memory for activations brings
enough of it, a context runs once before it is captured and stays as it was captured.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx

from .fake_cuda import ALIGNMENT, FakeCuda
from .plan_runs import DTYPES, ByOnnxRuntime, Place, Plan, Runs

VERSION = "10.16.1.11"
MAGIC = b"a plan that is none\n"

TYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "FLOAT", onnx.TensorProto.FLOAT16: "HALF", onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.INT32: "INT32", onnx.TensorProto.BOOL: "BOOL", onnx.TensorProto.BFLOAT16: "BF16",
}  # fmt: skip
"""ONNX type → TensorRT's name of it."""


class Flag(enum.IntEnum):
    STRONGLY_TYPED = 1
    TF32 = 2
    REQUIRE_USER_ALLOCATION = 3
    VERSION_COMPATIBLE = 4
    EXCLUDE_LEAN_RUNTIME = 5


class Strategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class Specialising(enum.Enum):
    LAZY = 0
    EAGER = 1


class Mode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class Type(enum.Enum):
    FLOAT = 0
    HALF = 1
    BF16 = 2
    INT32 = 3
    INT64 = 4
    BOOL = 5


class Logger:
    ERROR, INTERNAL_ERROR = 1, 0


def lean_library(cuda: FakeCuda, version: str = VERSION) -> Any:
    """The module of the lean runtime, which builds nothing and loads only what was built for it."""
    full = library(cuda, version)
    names = ("__version__", "ILogger", "ExecutionContextAllocationStrategy", "TensorIOMode")
    runtime = {"Runtime": lambda logger: Runtime(cuda, logger, version, lean=True)}
    return SimpleNamespace(**{name: getattr(full, name) for name in names}, **runtime)


def rtx_library(cuda: FakeCuda) -> Any:
    """The module of TensorRT-RTX, which compiles kernels for shapes when it likes to, unless it is told."""
    found = library(cuda)
    found.DynamicShapesKernelSpecializationStrategy = Specialising
    return found


def library(cuda: FakeCuda, version: str = VERSION, runs: Runs = ByOnnxRuntime) -> Any:
    """The module, on a device, whose plans `runs` computes."""
    return SimpleNamespace(
        __version__=version,
        ILogger=Logger,
        IKVCacheUpdateLayer=object,
        IProgressMonitor=ProgressMonitor,
        NetworkDefinitionCreationFlag=Flag,
        BuilderFlag=Flag,
        ExecutionContextAllocationStrategy=Strategy,
        TensorIOMode=Mode,
        Builder=lambda logger: Builder(version),
        OnnxParser=Parser,
        Runtime=lambda logger: Runtime(cuda, logger, version, runs=runs),
    )


# --- the builder ---


class Network:
    """A parsed graph."""

    def __init__(self) -> None:
        self.model = onnx.ModelProto()

    @property
    def num_layers(self) -> int:
        return len(self.model.graph.node)

    def get_layer(self, index: int) -> Any:
        node = self.model.graph.node[index]
        kinds = {"TensorScatter": "KV_CACHE_UPDATE", "Attention": "ATTENTION_INPUT"}
        return SimpleNamespace(
            type=f"LayerType.{kinds.get(node.op_type, node.op_type.upper())}",
            num_inputs=len(node.input),
            get_input=lambda i: SimpleNamespace(name=node.input[i]) if node.input[i] else None,
            get_output=lambda i: SimpleNamespace(name=node.output[i]),
        )

    @property
    def num_inputs(self) -> int:
        return len(self.model.graph.input)

    @property
    def num_outputs(self) -> int:
        return len(self.model.graph.output)

    def get_input(self, index: int) -> Any:
        return _tensor(self.model.graph.input[index])

    def get_output(self, index: int) -> Any:
        return _tensor(self.model.graph.output[index])


class Parser:
    num_errors = 0

    def __init__(self, network: Network, logger: Any) -> None:
        self._network = network

    def parse_from_file(self, path: str) -> bool:
        model = onnx.load(path)
        for node in model.graph.node:  # TensorRT's own, which ONNX Runtime refuses
            for attribute in [each for each in node.attribute if each.name.startswith("TRT_")]:
                node.attribute.remove(attribute)
        self._network.model = model
        return True


class ProgressMonitor:
    """What a build asks after each step whether it is to go on."""

    def step_complete(self, phase: str, step: int) -> bool:
        return True


class Config:
    def __init__(self) -> None:
        self.flags = {Flag.TF32}
        self.profiles: list[dict[str, Any]] = []
        self.progress_monitor = ProgressMonitor()

    def set_flag(self, flag: Flag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Flag) -> None:
        self.flags.discard(flag)

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, low: Sequence[int], usual: Sequence[int], high: Sequence[int]) -> None:
        self.shapes[name] = [list(low), list(usual), list(high)]


class Builder:
    def __init__(self, version: str) -> None:
        self._version = version

    def create_network(self, flags: int) -> Network:
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        if not config.progress_monitor.step_complete("build", 0):
            return None
        updates = {
            node.output[0]: node.input[0]
            for node in network.model.graph.node
            if node.op_type == "TensorScatter"
        }
        head = {
            "version": self._version,
            "profiles": config.profiles,
            "aliases": updates,
            "user_allocation": Flag.REQUIRE_USER_ALLOCATION in config.flags,
            "lean": Flag.VERSION_COMPATIBLE in config.flags,
            "carries_code": Flag.VERSION_COMPATIBLE in config.flags
            and Flag.EXCLUDE_LEAN_RUNTIME not in config.flags,
        }
        return MAGIC + json.dumps(head).encode() + b"\n" + network.model.SerializeToString()


def _tensor(value: onnx.ValueInfoProto) -> Any:
    kind = value.type.tensor_type
    shape = [-1 if each.dim_param else each.dim_value for each in kind.shape.dim]
    return SimpleNamespace(name=value.name, dtype=f"DataType.{TYPES[kind.elem_type]}", shape=shape)


# --- the runtime ---


class Runtime:
    def __init__(
        self,
        cuda: FakeCuda,
        logger: Any,
        version: str,
        lean: bool = False,
        runs: Runs = ByOnnxRuntime,
    ) -> None:
        self._cuda, self._logger, self._version, self._lean, self._runs = cuda, logger, version, lean, runs

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        self._cuda.queue.outside_a_capture("loading a plan")
        if not data.startswith(MAGIC):
            self._logger.log(
                Logger.ERROR, "IRuntime::deserializeCudaEngine: Error Code 1: magic tag mismatch"
            )
            return None
        text, _, model = data[len(MAGIC) :].partition(b"\n")
        head = json.loads(text)
        assert not head["carries_code"], "a plan carries code for the host"
        if head["lean"] != self._lean:
            self._logger.log(Logger.ERROR, "IRuntime::deserializeCudaEngine: not of this runtime")
            return None
        return Engine(self._cuda, self._logger, head, model, self._runs)


class Engine:
    _plans: ClassVar[dict[tuple[str, Runs], Plan]] = {}

    def __init__(
        self, cuda: FakeCuda, logger: Any, head: dict[str, Any], data: bytes, runs: Runs = ByOnnxRuntime
    ) -> None:
        self.cuda, self.logger, self._head = cuda, logger, head
        graph = onnx.load_from_string(data).graph
        weights = {tensor.name for tensor in graph.initializer}
        self.inputs = {value.name: value for value in graph.input if value.name not in weights}
        self.outputs = {value.name: value for value in graph.output}
        self.values = {**self.inputs, **self.outputs}
        self.user_allocation = head["user_allocation"]
        key = hashlib.sha256(data).hexdigest(), runs
        if key not in self._plans:
            self._plans[key] = runs(data)
        self.plan = self._plans[key]

    @property
    def num_io_tensors(self) -> int:
        return len(self.values)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._head["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return list(self.values)[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name in self.inputs else Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Type:
        return Type[TYPES[self.values[name].type.tensor_type.elem_type]]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[Any, ...]]:
        shapes = self._head["profiles"][profile].get(name)
        return [tuple(self.dimensions(name))] * 3 if shapes is None else [tuple(each) for each in shapes]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._head["aliases"].get(name)

    def create_runtime_config(self) -> Any:
        """Of TensorRT-RTX."""

        def allocated_by(strategy: Strategy) -> None:
            config.strategy = strategy

        def keep(cache: RuntimeCache) -> bool:
            config.cache = cache
            return True

        config = SimpleNamespace(
            strategy=Strategy.STATIC,
            cache=None,
            set_execution_context_allocation_strategy=allocated_by,
            dynamic_shapes_kernel_specialization_strategy=Specialising.LAZY,
            create_runtime_cache=RuntimeCache,
            set_runtime_cache=keep,
        )
        return config

    def create_execution_context(self, strategy: Any = Strategy.STATIC) -> ExecutionContext:
        self.cuda.queue.outside_a_capture("making an execution context")
        cache = getattr(strategy, "cache", None)
        if cache is not None:
            cache.compile(str(sorted(self.values)))
        if not isinstance(strategy, Strategy):
            assert strategy.dynamic_shapes_kernel_specialization_strategy is Specialising.EAGER, (
                "kernels of any shape would be captured"
            )
            strategy = strategy.strategy
        assert strategy is Strategy.USER_MANAGED, "a context that allocates for itself cannot be captured"
        return ExecutionContext(self)

    def dimensions(self, name: str) -> list[int | str]:
        """A value's shape; symbolic dimensions by name."""
        return [each.dim_param or each.dim_value for each in self.values[name].type.tensor_type.shape.dim]


class RuntimeCache:
    """Of TensorRT-RTX: kernels that were compiled, by what they are for. It takes those of its own environment only."""

    environment: ClassVar[str] = "a GPU that is not there"
    compiled: ClassVar[int] = 0
    """Of all caches, so far."""

    def __init__(self) -> None:
        self._kernels: list[str] = []

    def compile(self, what: str) -> None:
        """A context needs kernels."""
        if what not in self._kernels:
            self._kernels.append(what)
            type(self).compiled += 1

    def serialize(self) -> bytes:
        return json.dumps([self.environment, self._kernels]).encode()

    def deserialize(self, blob: bytes) -> bool:
        try:
            environment, kernels = json.loads(bytes(blob))
        except ValueError:
            return False
        if environment == self.environment:
            self._kernels = kernels
        return environment == self.environment


class ExecutionContext:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._cuda = engine, engine.cuda
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory = (0, 0)
        self._need: int | None = None
        self._ran: Any = None
        """How it stood when it last ran outside a capture."""
        self._binding: tuple[Any, Any] | None = None

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return 0 <= profile < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        declared = self._engine.dimensions(name)
        fits = len(shape) == len(declared) and all(
            a <= size <= b if isinstance(each, str) else size == each
            for a, size, b, each in zip(low, shape, high, declared, strict=True)
        )
        if not fits:
            self._engine.logger.log(Logger.ERROR, f"{name} {shape} is not in profile {self._profile}")
        self._shapes[name], self._need = shape, None
        return fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self._engine.values, f"there is no {name}"
        self._addresses[name] = address
        return address % ALIGNMENT == 0

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine.inputs if name not in self._shapes]

    def update_device_memory_size_for_shapes(self) -> int:
        """Larger shapes need more, so that the block has to grow now and then."""
        assert not self.infer_shapes(), "shapes are missing"
        self._need = 512 + math.prod(self._sizes().values())
        return self._need

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % ALIGNMENT == 0, f"activation memory at {address:#x} is not aligned"
        assert self._need is not None and size >= self._need, (
            "too little activation memory, or nobody asked how much"
        )
        self._memory = (address, size)

    def is_stream_capturable(self, stream: int) -> bool:
        return self._engine.user_allocation

    def execute_async_v3(self, stream: int) -> bool:
        engine, queue = self._engine, self._cuda.queue
        state = (dict(self._shapes), dict(self._addresses), self._memory)
        missing = engine.values.keys() - self._addresses.keys()
        if missing or not self._memory[0]:
            engine.logger.log(Logger.ERROR, f"no address for {sorted(missing)} or activations")
            return False
        for name in engine.outputs:
            alias = engine.get_aliased_input_tensor(name)
            assert alias is None or state[1][name] == state[1][alias], f"{name} is not at {alias}"
        capturing = queue._capturing is not None
        if capturing:
            assert engine.user_allocation, "TensorRT allocates in a capture"
            assert self._ran == state, "captured before it ran once as it is"
        else:
            self._ran = state

        def work() -> None:
            now = (self._shapes, self._addresses, self._memory)
            assert now == state, "a context was changed while its work was queued or captured"
            self._compute()

        queue.enqueue(work)
        return True

    def _sizes(self) -> dict[str, int]:
        """Of the symbolic dimensions."""
        return {
            each: size
            for name, shape in self._shapes.items()
            for each, size in zip(self._engine.dimensions(name), shape, strict=True)
            if isinstance(each, str)
        }

    def _compute(self) -> None:
        engine, cuda = self._engine, self._cuda
        cuda.bytes_at(*self._memory)[...] = 0xA5
        if self._binding is None or self._binding[0] != (self._shapes, self._addresses):
            sizes = self._sizes()

            def place(name: str) -> Place:
                kind = engine.values[name].type.tensor_type.elem_type
                shape = tuple(
                    sizes[each] if isinstance(each, str) else each for each in engine.dimensions(name)
                )
                nbytes = math.prod(shape) * np.dtype(DTYPES[kind]).itemsize
                address = self._addresses[name]
                return Place(kind, shape, address, cuda.bytes_at(address, nbytes))

            sides = ({name: place(name) for name in side} for side in (engine.inputs, engine.outputs))
            self._binding = ((dict(self._shapes), dict(self._addresses)), engine.plan.bind(*sides))
        self._binding[1]()
