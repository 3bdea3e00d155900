"""A TensorRT plan that is loaded: what it binds, the shapes that it takes, and whether this machine can run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..bundle.manifest import GraphInfo, ValueInfo
from ..bundle.plans import Plan
from ..common.errors import BundleError, CapacityError, DeviceError
from . import tensorrt_library
from .base import View
from .kernel_cache import KernelCache
from .kv_append import new_name

UPDATED = "updated_"
"""How the names of outputs begin that lie where their inputs do."""


class LoadedPlan:
    """A deserialised plan, compared with its entry in the manifest."""

    def __init__(
        self,
        plan: Plan,
        engine: Any,
        library: Any,
        command: str,
        kernels: KernelCache | None,
        sha256: str,
        failed: Callable[[str, str], DeviceError | CapacityError],
    ):
        """`failed(step, what)` is the error of a step that TensorRT did not take."""
        self.plan, self._engine, self._library, self._command = plan, engine, library, command
        self._failed = failed
        self._kernels, self._sha256 = kernels, sha256
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        kinds = {name: engine.get_tensor_dtype(name).name for name in names}
        modes = {name: engine.get_tensor_mode(name).name.lower() for name in names}
        declared = {each.name: (each.mode, each.dtype) for each in plan.bindings}
        actual = {
            name: (modes[name], tensorrt_library.DTYPES.get(kinds[name], kinds[name])) for name in names
        }
        odd = sorted(
            name for name in declared.keys() | actual.keys() if declared.get(name) != actual.get(name)
        )
        if odd:
            raise BundleError(
                f"{plan.file}: inputs or outputs differ from manifest field 'plans': {', '.join(odd[:4])}; build it again "
                f"with {command}"
            )
        self.aliases = {each.name: each.alias_of for each in plan.bindings if each.alias_of is not None}
        for name, alias in self.aliases.items():
            if engine.get_aliased_input_tensor(name) != alias:
                raise BundleError(
                    f"{plan.file}: {name} does not share the memory of {alias}, as the manifest says; build it again with "
                    f"{command}"
                )
        self._profiles = [self._ranges(number) for number in range(engine.num_optimization_profiles)]

    def sizes(self, views: Mapping[str, View]) -> dict[str, int]:
        """What every symbolic dimension of the inputs is. Raises `ValueError` for shapes that do not fit the plan."""
        sizes: dict[str, int] = {}
        for name, binding in self.plan.inputs.items():
            shape = views[name].shape
            fits = len(shape) == len(binding.shape)
            for size, dimension in zip(shape, binding.shape, strict=False):
                fits = fits and size == (
                    sizes.setdefault(dimension, size) if isinstance(dimension, str) else dimension
                )
            if not fits:
                raise ValueError(
                    f"graph {self.plan.graph}: {name} is {binding.shape} in {self.plan.file}, bound {shape}; build the plans "
                    f"again with {self._command}"
                )
        return sizes

    def context(self, sizes: Mapping[str, int], views: Mapping[str, View], stream: int) -> Any:
        """A new execution context with these shapes. Raises `ValueError` for shapes outside every profile, `CapacityError`
        without memory."""
        profile = self._profile(sizes)
        context: Any = self._engine.create_execution_context(self._strategy())
        if context is None:
            raise self._failed("make an execution context of", self.plan.file)
        if not context.set_optimization_profile_async(profile, stream) or not all(
            context.set_input_shape(name, views[name].shape) for name in self.plan.inputs
        ):
            raise DeviceError(
                f"TensorRT takes no {dict(sizes)} of graph {self.plan.graph}; build the plans again with {self._command}"
            )
        return context

    def _strategy(self) -> Any:
        """What a context is made with: the engine brings its memory. TensorRT-RTX compiles kernels for the shapes at once:
        those that it uses until then would be the ones that are captured."""
        user_managed = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        specialising = getattr(self._library, "DynamicShapesKernelSpecializationStrategy", None)
        if specialising is None:
            return user_managed
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        config.dynamic_shapes_kernel_specialization_strategy = specialising.EAGER
        if self._kernels is not None and hasattr(config, "create_runtime_cache"):
            self._kernels.attach(config, self._sha256)
        return config

    def _profile(self, sizes: Mapping[str, int]) -> int:
        """The profile with these sizes, of several the one whose largest sizes are smallest."""
        fitting = [
            (math.prod(high for _, high in ranges.values()), number)
            for number, ranges in enumerate(self._profiles)
            if all(low <= sizes[name] <= high for name, (low, high) in ranges.items())
        ]
        if fitting:
            return min(fitting)[1]
        has = "; ".join(
            ", ".join(f"{name} {low} to {high}" for name, (low, high) in ranges.items())
            for ranges in self._profiles
        )
        needed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"graph {self.plan.graph}: no profile of {self.plan.file} has {needed}; it has {has}; build a bundle with larger "
            f"limits, and its plans with {self._command}"
        )

    def _ranges(self, number: int) -> dict[str, tuple[int, int]]:
        """Smallest and largest size of every symbolic dimension in a profile."""
        ranges: dict[str, tuple[int, int]] = {}
        for name, binding in self.plan.inputs.items():
            if not any(isinstance(size, str) for size in binding.shape):
                continue
            low, _, high = self._engine.get_tensor_profile_shape(name, number)
            for size, least, most in zip(binding.shape, low, high, strict=True):
                if isinstance(size, str):
                    before = ranges.get(size, (least, most))
                    ranges[size] = (max(before[0], least), min(before[1], most))
        return ranges


def plan_interface(info: GraphInfo, plan: Plan) -> GraphInfo:
    """A graph as its plan binds it: the types are the plan's, and what it offers beside the graph's outputs."""
    bindings = {each.name: each.value for each in plan.bindings}

    def bound(value: ValueInfo) -> ValueInfo:
        # An updated cache is of the type of the cache, whether the plan has it as an output or not.
        binding = bindings.get(value.name.removeprefix(UPDATED))
        return (
            value if binding is None else ValueInfo(name=value.name, dtype=binding.dtype, shape=value.shape)
        )

    outputs = [bound(value) for value in info.outputs]
    known = {value.name for value in outputs} | {new_name(value.name) for value in outputs}
    more = [each.value for name, each in plan.outputs.items() if name not in known]
    return GraphInfo(
        file=plan.file,
        role=info.role,
        inputs=[bound(value) for value in info.inputs],
        outputs=[*outputs, *more],
        layers=info.layers,
    )


def check_version(plans: Mapping[str, Plan], version: str, command: str) -> None:
    """Raise `BundleError` for plans that the TensorRT of this `version` cannot run."""
    here = tensorrt_library.numbers(version, 3)
    for plan in plans.values():
        built = tensorrt_library.numbers(plan.version, 3)
        runs = built[0] == here[0] and built <= here if plan.lean else built == here
        if not runs:
            raise BundleError(
                f"{plan.file}: built by {plan.backend} {plan.version}, here is {version}, which cannot run it; build the plans "
                f"again with {command}"
            )


def check_driver(plans: Mapping[str, Plan], driver: str, command: str) -> None:
    """Raise `DeviceError` where the driver is too old: it runs what was built with its own major version of CUDA and older
    ones."""
    for plan in plans.values():
        if plan.cuda is not None and tensorrt_library.numbers(driver, 1) < tensorrt_library.numbers(
            plan.cuda, 1
        ):
            raise DeviceError(
                f"{plan.file}: built with CUDA {plan.cuda}, the driver here knows CUDA {driver} at most: update the driver, or "
                f"build the plans again with {command}"
            )
