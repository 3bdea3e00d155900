"""Errors of an engine with a queue, and of those who drive it, planted in the real code or in the recording device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lossless
import numpy as np
import pytest
from engines import memory, recording_device
from engines.recording_device import RecordingDevice
from engines.stream import Context
from rig import Rig
from vlmexport.runtime.decode.kv import KVArena
from vlmexport.runtime.decode.passes import Decoder
from vlmexport.runtime.decode.target_rows import TargetRows
from vlmexport.runtime.engines.base import View
from vlmexport.runtime.engines.buffers import HostBuffer
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu
from vlmexport.runtime.errors import NumericsError

Patch = pytest.MonkeyPatch


def not_finite(rig: Rig) -> None:
    """A number that leaves its range ends the request with an error; here a key of the first row turns to NaN."""
    request = rig.request(71)
    proposer = lossless.DRAFTS["early-exit"](rig, ())
    cycle, noticed = lossless.Cycle.run, False

    def damaged(self: Any) -> Any:
        for view in rig.decoder.arena.view(0):
            values = np.array(rig.engine.read(view))
            values[0, 0, 0] = np.nan
            rig.engine.write(view, values)
        return cycle(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossless.Cycle, "run", damaged)
        try:
            lossless.generate(rig, request, 12, proposer=proposer, length=3)
        except NumericsError:
            noticed = True
    assert noticed, "nobody noticed that logits are not finite"


def missing_synchronisation(patch: Patch) -> None:
    """Results are fetched while the work is still in the queue."""

    def early(self: Any, view: View) -> np.ndarray:
        values = self.memory.array(view).copy()
        self.stream.synchronise()
        return values

    patch.setattr(RecordingDevice, "read", early)


def updated_cache_elsewhere(patch: Patch) -> None:
    """The engine computes new values of a cache into memory of its own."""
    bind = OnnxRuntimeCpu._bind

    def wrong(self: Any, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Any:
        moved = dict(outputs)
        for name, view in outputs.items():
            if name.startswith("updated_value_cache."):
                moved[name] = memory.allocate(name, view.nbytes, True).view(view.shape, view.dtype)
        return bind(self, graph, inputs, moved)

    patch.setattr(OnnxRuntimeCpu, "_bind", wrong)


def keys_and_values_swapped(patch: Patch) -> None:
    """The runtime binds an updated cache at another's address."""
    bindings = KVArena.bindings

    def wrong(self: Any, *args: Any) -> Any:
        inputs, outputs = bindings(self, *args)
        swap = {"updated_key_cache": "updated_value_cache", "updated_value_cache": "updated_key_cache"}
        return inputs, {
            f"{swap[name.split('.')[0]]}.{name.split('.')[1]}": view for name, view in outputs.items()
        }

    patch.setattr(KVArena, "bindings", wrong)


def stale_mask(patch: Patch) -> None:
    """A mask reaches the device only the first time that its shape is used."""
    push, seen = HostBuffer.push, set()

    def wrong(self: Any, shape: tuple[int, ...]) -> None:
        if self.buffer.name == "attn_mask":
            if (self.buffer.address, shape) in seen:
                return
            seen.add((self.buffer.address, shape))
        push(self, shape)

    patch.setattr(HostBuffer, "push", wrong)


def write_beyond_the_buffer(patch: Patch) -> None:
    """The pass that fills the last row of the cache writes one further."""
    run = Decoder._run

    def wrong(self: Any, prepared: Any) -> None:
        prepared.indices[prepared.indices + prepared.width == self.arena.capacity] += 1
        run(self, prepared)

    patch.setattr(Decoder, "_run", wrong)


def buffer_too_small(patch: Patch) -> None:
    """Masks get less memory than they take."""
    allocate = RecordingDevice.allocate

    def wrong(self: Any, name: str, nbytes: int, zeroed: bool = False) -> Any:
        return allocate(self, name, nbytes // 64 if name == "attn_mask" else nbytes, zeroed)

    patch.setattr(RecordingDevice, "allocate", wrong)


def staging_memory_reused(patch: Patch) -> None:
    """The host prepares the next pass in memory that the device has not fetched yet."""

    def wrong(self: Any, shape: tuple[int, ...]) -> None:
        self._engine.write(self.view(shape), self.host(shape))

    patch.setattr(HostBuffer, "push", wrong)


def caches_not_zeroed(patch: Patch) -> None:
    """A cache starts with whatever was in its memory."""
    allocate = RecordingDevice.allocate
    patch.setattr(
        RecordingDevice, "allocate", lambda self, name, nbytes, zeroed=False: allocate(self, name, nbytes)
    )


def context_of_a_graph(patch: Patch) -> None:
    """All calls of one graph share an execution context, captured ones too."""
    contexts: dict[Any, Context] = {}
    patch.setattr(
        RecordingDevice,
        "_context",
        lambda self, graph, key: contexts.setdefault((id(self), graph), Context(graph)),
    )


def nan_logits(patch: Patch) -> None:
    """Every fourth call of the head gives NaN for one token of its first row."""
    judge, calls = recording_device._Call._judge, []

    def wrong(self: Any) -> None:
        calls.append(self)
        if len(calls) % 4 == 0:
            self._value("logits")[0, 5] = np.nan
        judge(self)

    patch.setattr(recording_device._Call, "_judge", wrong)


def finite_always_true(patch: Patch) -> None:
    """The device's flag does not look."""
    judge = recording_device._Call._judge

    def wrong(self: Any) -> None:
        judge(self)
        self._value("finite")[...] = True

    patch.setattr(recording_device._Call, "_judge", wrong)


def finite_not_asked(patch: Patch) -> None:
    """The runtime takes the device's best token without asking whether it is one."""
    patch.setattr(TargetRows, "check", lambda self, row: None)


def best_of_the_row_before(patch: Patch) -> None:
    """The device's best tokens are one row off."""
    judge = recording_device._Call._judge

    def wrong(self: Any) -> None:
        judge(self)
        self._value("best")[...] = np.roll(self._value("best"), 1)

    patch.setattr(recording_device._Call, "_judge", wrong)
