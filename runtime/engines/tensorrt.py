"""TensorRT plans of a bundle on a GPU: one execution context per bound call, caches updated where they lie.

Contexts share one block of memory for activations, since the calls of a stream follow each other; it is allocated here, so
that nothing is allocated while work is captured.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bundle.manifest import GraphInfo, ValueInfo
from ..bundle.plans import Plan, choose_plans, compile_command, planned
from ..common.bfloat16 import widen
from ..common.errors import BundleError, CapacityError, DeviceError
from ..common.foreign_errors import raise_if_foreign
from . import tensorrt_library
from .base import DTYPES, Buffer, Call, View
from .calls import BoundCalls
from .cuda import Cuda
from .device import DeviceEngine, Steps
from .kernel_cache import KernelCache
from .kv_append import NEW_MASKS, START, new_name, pass_width
from .kv_append_kernels import Appending
from .out_of_memory import LESS_ON_A_GPU, out_of_memory
from .tensorrt_context import BoundContext
from .tensorrt_plan import UPDATED, LoadedPlan, check_driver, check_version, plan_interface

if TYPE_CHECKING:
    from pathlib import Path

    from ..bundle.folder import Bundle

log = logging.getLogger(__name__)

TABLE_ROWS = 1 << 14
"""Rows of a shared table that are converted at a time."""


class TensorRTEngine(DeviceEngine):
    """`Engine` on the plans that a bundle has for this GPU. They are deserialised when first bound, or by `load`.

    It computes and caches in the precision of the plans. The cache is as long as they were built for.
    """

    name = "tensorrt"
    static_cache = True

    def __init__(
        self,
        bundle: Bundle,
        plans: Mapping[str, Plan],
        library: Any,
        cuda: Cuda,
        kernels: KernelCache | None = None,
    ):
        """`plans` has one of every graph that may have one, `library` is the module of their TensorRT; `kernels`: where TensorRT-RTX keeps
        what it compiles. Raises `BundleError` for plans of another version."""
        first = next(iter(plans.values()))
        self._command = compile_command(bundle.path, first.backend, first.target, first.lean)
        check_version(plans, str(library.__version__), self._command)
        check_driver(plans, cuda.versions().driver, self._command)
        super().__init__(planned(bundle.manifest), cuda)
        self.version = str(library.__version__)
        self._bundle, self._plans, self._library, self._kernels = bundle, plans, library, kernels
        if first.precision != bundle.manifest.compute_dtype:
            self.note = (
                f"TensorRT plans of {first.precision}: this engine computes and caches in {first.precision}, "
                f"the bundle's graphs in {bundle.manifest.compute_dtype}"
            )
        self._logger = tensorrt_library.make_logger(library)
        self._runtime = library.Runtime(self._logger)
        self._interfaces = {name: plan_interface(info, plans[name]) for name, info in self.graphs.items()}
        self._loaded: dict[str, LoadedPlan] = {}
        # The context of a call that is dropped may still be at work.
        self._calls = BoundCalls(self.synchronise)
        self._bound: weakref.WeakSet[BoundContext] = weakref.WeakSet()
        self._activations: Buffer | None = None
        self._unread: dict[tuple[str, str], Buffer] = {}
        self._tables: dict[str, View] = {}
        self._appending: Appending | None = None

    @classmethod
    def open(cls, bundle: Bundle, kernel_cache: Path | None = None) -> TensorRTEngine:
        """The engine for the GPU of this machine. `kernel_cache` is a folder for what TensorRT-RTX compiles; other
        TensorRT leave it empty.

        Raises `DeviceError` without a GPU, its driver or TensorRT, `OptionError` where the bundle has no plans for it, and
        `BundleError` for plans that cannot be trusted or are of another version.
        """
        cuda = Cuda.open()
        plans = choose_plans(
            bundle.manifest, bundle.path, cuda.gpu().architecture, tensorrt_library.installed
        )
        first = next(iter(plans.values()))
        backend = first.backend
        try:
            library = tensorrt_library.import_library(backend, first.lean)
        except ModuleNotFoundError as error:
            other = ""
            if backend == "tensorrt" and tensorrt_library.installed(backend):
                again = compile_command(bundle.path, backend, first.target, not first.lean)
                other = f"; or build them for the {'full' if first.lean else 'lean'} runtime, which is here, with {again}"
            raise DeviceError(
                f"the plans of {bundle.path} are of {backend}, and the module {error.name} is missing: "
                f"{'pip install tensorrt-lean' if first.lean else tensorrt_library.install_hint(backend)}{other}"
            ) from error
        except (ImportError, OSError, RuntimeError) as error:
            raise_if_foreign(error)
            raise DeviceError(
                f"{backend} is installed but cannot be loaded: {tensorrt_library.first_line(error)}"
            ) from error
        kernels = None if kernel_cache is None else KernelCache(kernel_cache)
        return cls(bundle, plans, library, cuda, kernels)

    def interface(self, graph: str) -> GraphInfo:
        return self._interfaces.get(graph) or super().interface(graph)

    def load(self, *graphs: str) -> None:
        for graph in graphs:
            self._load(graph)

    def constant(self, name: str, array: np.ndarray) -> View:
        """Tensors of the bundle that plans take as inputs are held once, in the type that these bind."""
        if (
            any(name in plan.inputs for plan in self._plans.values())
            and name in self._bundle.manifest.tensors
        ):
            return self._table(name)
        return super().constant(name, array)

    def close(self) -> None:
        if self.stream:
            self.synchronise()
        self._calls.clear()
        if self._kernels is not None:
            self._kernels.save()
        for call in list(self._bound):
            call.forget()
        self._loaded.clear()
        super().close()

    # --- calls ---

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        return self._calls.get(graph, inputs, outputs, self._new_call)

    def _new_call(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        updates = any(name.startswith(UPDATED) for name in outputs)
        portable = self._plans[graph].lowering == "portable" and updates
        return (self._appending_call if portable else self._bound_call)(graph, inputs, outputs)

    def _bound_call(
        self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]
    ) -> BoundContext:
        loaded = self._load(graph)
        given = dict(inputs)
        for name in loaded.plan.inputs.keys() - inputs.keys():
            given[name] = self._table(name)
        sizes = loaded.sizes(given)
        views = given | dict(outputs)
        for name, binding in loaded.plan.outputs.items():
            if name not in views:
                views[name] = self._scratch(graph, binding.value, sizes)
        for name, alias in loaded.aliases.items():
            if views[name].address != views[alias].address:
                raise ValueError(f"graph {graph}: {name} must be bound at the address of {alias}")
        self._logger.errors.clear()
        context = loaded.context(sizes, given, self.stream)
        for name, view in views.items():
            if not context.set_tensor_address(name, view.address):
                raise self._failed("bind", f"{name} of {graph}")
        if missing := context.infer_shapes():
            raise self._failed("bind", f"{', '.join(missing)} of {graph}")
        call = BoundContext(self, graph, context, tuple(views.values()), self._failed)
        self._bound.add(call)
        self._give_memory(call, context.update_device_memory_size_for_shapes())
        return call

    def _appending_call(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        """A portable plan, which hands out new keys and values, between the split of its mask and their way into the
        caches."""
        if self._appending is None:
            self._appending = Appending(self)
        plan, starts = self._plans[graph], inputs[START]
        masks = {name: inputs[name] for name in NEW_MASKS if name in inputs}
        width = pass_width(inputs)
        given = {name: view for name, view in inputs.items() if name in plan.inputs}
        made = {name: view for name, view in outputs.items() if not name.startswith(UPDATED)}
        steps: list[Call] = []
        for name, mask in masks.items():
            given[name] = before = self.passing(f"{name}.before", mask.shape, mask.dtype)
            given[NEW_MASKS[name]] = own = self.passing(f"{name}.own", (*mask.shape[:3], width), mask.dtype)
            steps.append(self._appending.split(mask, starts, before, own))
        pairs: list[tuple[View, View]] = []
        for name, cache in outputs.items():
            if name.startswith(UPDATED):
                batch, heads, _, size = cache.shape
                new_kv = self.passing(f"new_kv.{len(pairs)}", (batch, heads, width, size), cache.dtype)
                made[new_name(name)] = new_kv
                pairs.append((new_kv, cache))
        steps.append(self._bound_call(graph, given, made))
        by_shape: dict[tuple[int, ...], list[tuple[View, View]]] = {}
        for pair in pairs:
            by_shape.setdefault(pair[0].shape, []).append(pair)
        steps += [self._appending.append(alike, starts) for alike in by_shape.values()]
        return Steps(steps)

    def _give_memory(self, call: BoundContext, nbytes: int) -> None:
        """Let `call` have activation memory; where it needs more than there is, all calls that are not captured move. The
        others keep the block whose address was captured."""
        block = self._activations
        if block is None or block.nbytes < nbytes:
            self.synchronise()
            block = self._activations = self.allocate("activations", max(nbytes, self.alignment))
            for other in self._bound:
                if not other.captured:
                    other.use(block)
            self.settled += 1
        call.use(block)

    def _scratch(self, graph: str, value: ValueInfo, sizes: Mapping[str, int]) -> View:
        """Memory for an output that nobody reads; every output of a plan needs an address."""
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in value.shape)
        nbytes = math.prod(shape) * DTYPES[value.dtype].itemsize
        buffer = self._unread.get((graph, value.name))
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._unread[graph, value.name] = self.allocate(f"{graph}.{value.name}.unread", nbytes)
        return buffer.view(shape, value.dtype)

    def _table(self, name: str) -> View:
        if name not in self._tables:
            stored = self._bundle.tensor(name)
            kinds = {plan.inputs[name].dtype for plan in self._plans.values() if name in plan.inputs}
            if len(kinds) != 1:
                raise BundleError(
                    f"plans bind {name} as {' and '.join(sorted(kinds))}; build them again with {self._command}"
                )
            kind = kinds.pop()
            view = self.allocate(name, stored.size * DTYPES[kind].itemsize).view(stored.shape, kind)
            width = stored.shape[-1]
            for start in range(0, len(stored), TABLE_ROWS):
                part = widen(stored[start : start + TABLE_ROWS], DTYPES[kind])
                self.write(view.buffer.view(part.shape, kind, start * width), part)
            self._tables[name] = view
        return self._tables[name]

    # --- plans ---

    def _load(self, graph: str) -> LoadedPlan:
        loaded = self._loaded.get(graph)
        if loaded is None:
            super().interface(graph)
            begin, plan = time.perf_counter(), self._plans[graph]
            self._logger.errors.clear()
            engine = self._runtime.deserialize_cuda_engine(self._checked_bytes(plan))
            if engine is None and out_of_memory(*self._logger.errors):
                raise self._failed("load", plan.file)
            if engine is None:
                raise BundleError(
                    f"{plan.backend} {self._library.__version__} cannot load {plan.file}: "
                    f"{tensorrt_library.first_error(self._logger.errors)}; build it again with {self._command}"
                )
            loaded = self._loaded[graph] = LoadedPlan(
                plan, engine, self._library, self._command, self._kernels, self._sha256(plan), self._failed
            )
            log.debug("loaded %s in %.2f s", plan.file, time.perf_counter() - begin)
        return loaded

    def _checked_bytes(self, plan: Plan) -> bytes:
        """A plan's file: TensorRT is given what was compared with its checksum, and nothing else."""
        path = self._bundle.path / plan.file
        try:
            with self._bundle.reading(plan.file):
                data = path.read_bytes()
        except OSError as error:
            raise_if_foreign(error)
            raise BundleError(f"{path}: cannot be read ({error.strerror})") from error
        digest, listed = hashlib.sha256(data).hexdigest(), self._sha256(plan)
        if digest != listed:
            raise BundleError(
                f"{path}: SHA-256 is {digest[:12]}…, the manifest says {listed[:12]}…: the file was changed; build it again "
                f"with {self._command}"
            )
        return data

    def _sha256(self, plan: Plan) -> str:
        return self._bundle.manifest.files[plan.file].sha256

    def _failed(self, step: str, what: str) -> DeviceError | CapacityError:
        """The error of a step that TensorRT did not take."""
        reason = tensorrt_library.first_error(self._logger.errors)
        if out_of_memory(*self._logger.errors):
            return CapacityError(f"TensorRT has no memory to {step} {what}: {reason:.200}; {LESS_ON_A_GPU}")
        return DeviceError(
            f"TensorRT cannot {step} {what}: {reason}; build the plans again with {self._command}"
        )
