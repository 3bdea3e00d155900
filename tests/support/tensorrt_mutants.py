"""Errors of the engine that runs TensorRT plans, and of those who drive it, planted in the real code."""

from __future__ import annotations

from typing import Any

import pytest
from vlmexport.runtime.engines.device import _Captured
from vlmexport.runtime.engines.kv_append_kernels import Appending
from vlmexport.runtime.engines.tensorrt import TensorRTEngine
from vlmexport.runtime.engines.tensorrt_context import BoundContext
from vlmexport.runtime.engines.tensorrt_plan import LoadedPlan

from tests.support import gpu_mutants as gpu
from tests.support import lossless
from tests.support.engines.fake_tensorrt import ExecutionContext
from tests.support.rig import Rig

Patch = pytest.MonkeyPatch


def a_longer_prompt(rig: Rig) -> None:
    """A longer prompt needs more memory for activations: after a cycle that ran once, and after one that was captured. Both
    are done again. Not with cross-attention, where another length has programs of its own."""
    for seed, length, limit in ((51, 4, 4), (52, 24, 20), (53, 40, 20), (51, 4, 20)):
        request = rig.request(seed, length)
        proposer = lossless.DRAFTS["early-exit"](rig, ())
        run = lossless.generate(rig, request, limit, proposer=proposer, length=3)
        assert run.tokens == rig.oracle.greedy(request, limit)
    rig.settle()


def updated_cache_elsewhere(patch: Patch) -> None:
    """An updated cache is bound to memory of its own."""
    gpu.updated_cache_elsewhere(patch, TensorRTEngine)


def aliases_not_compared(patch: Patch) -> None:
    """The same, by an engine that does not look where outputs lie."""
    updated_cache_elsewhere(patch)
    loaded = TensorRTEngine._load

    def wrong(self: Any, graph: str) -> Any:
        found = loaded(self, graph)
        found.aliases = {}
        return found

    patch.setattr(TensorRTEngine, "_load", wrong)


def context_of_a_graph(patch: Patch) -> None:
    """All calls of one graph share an execution context."""
    made = LoadedPlan.context
    contexts: dict[int, Any] = {}

    def wrong(self: Any, sizes: Any, views: Any, stream: int) -> Any:
        if id(self) not in contexts:
            contexts[id(self)] = (self, made(self, sizes, views, stream))
        context = contexts[id(self)][1]
        context.set_optimization_profile_async(self._profile(sizes), stream)
        for name in self.plan.inputs:
            context.set_input_shape(name, views[name].shape)
        return context

    patch.setattr(LoadedPlan, "context", wrong)


def first_profile_always(patch: Patch) -> None:
    """Every call takes the profile of prompts."""
    patch.setattr(LoadedPlan, "_profile", lambda self, sizes: 0)


def activations_freed(patch: Patch) -> None:
    """Memory for activations goes when there is a larger block, whoever captured its address."""

    def wrong(self: Any, memory: Any) -> None:
        self._context.set_device_memory(memory.address, memory.nbytes)

    patch.setattr(BoundContext, "use", wrong)


def activations_too_small(patch: Patch) -> None:
    """The block for activations is as large as the first call needs it."""

    def wrong(self: Any, call: Any, nbytes: int) -> None:
        if self._activations is None:
            self._activations = self.allocate("activations", nbytes)
        call.use(self._activations)

    patch.setattr(TensorRTEngine, "_give_memory", wrong)


def captured_at_once(patch: Patch) -> None:
    """A program is captured before its calls ran once."""

    def wrong(self: Any) -> None:
        if not self._captured:
            self._capture()
        self._engine.cuda.launch(self._captured, self._engine.stream)

    patch.setattr(_Captured, "launch", wrong)


def captured_before_it_moved(patch: Patch) -> None:
    """A program that ran once is captured, although its activations lie elsewhere since."""

    def settled(self: Any) -> bool:
        return bool(self._ran is not None and self._can_be_captured())

    launch = _Captured.launch

    def wrong(self: Any) -> None:
        if settled(self):
            self._ran = self._engine.settled
        launch(self)

    patch.setattr(_Captured, "launch", wrong)


def nan_logits(patch: Patch) -> None:
    """Every fourth call of the head is given rows that are not numbers."""
    compute, calls = ExecutionContext._compute, []

    def wrong(self: Any) -> None:
        if "logits" in self._engine.outputs:
            calls.append(self)
            if len(calls) % 4 == 0:
                rows = self._cuda.bytes_at(self._addresses["hidden"], 4)
                rows[:] = 0xFF
        compute(self)

    patch.setattr(ExecutionContext, "_compute", wrong)


def masks_split_once(patch: Patch) -> None:
    """Around a portable plan a mask is parted for the first pass alone."""
    made = Appending.split

    def wrong(self: Any, *views: Any) -> Any:
        return _Once(made(self, *views))

    patch.setattr(Appending, "split", wrong)


class _Once:
    """A kernel that is launched the first time only."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def run(self) -> None:
        if self._kernel is not None:
            self._kernel.run()
        self._kernel = None


def rows_in_the_other_cache(patch: Patch) -> None:
    """New keys are put where values belong, and values where keys do."""
    append = Appending.append

    def wrong(self: Any, pairs: Any, starts: Any) -> Any:
        caches = [cache for _, cache in pairs]
        moved = [caches[index ^ 1] for index in range(len(caches))]
        return append(self, [(rows, cache) for (rows, _), cache in zip(pairs, moved, strict=True)], starts)

    patch.setattr(Appending, "append", wrong)
