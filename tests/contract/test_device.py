"""What the recording device saw of whole generations, and that it does refuse what a device cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lossless
import numpy as np
import pytest
from engines.recording_device import RecordingDevice
from rig import FAMILIES, Rig
from vlmexport.runtime.engines.base import Buffer, View

# --- generations ---


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trunk_runs_once_per_token_and_the_tail_once_per_cycle(rigs: Callable, family: str) -> None:
    rig: Rig = rigs(family, "device")
    request = rig.request(51)
    truth = rig.oracle.greedy(request, 25)
    rig.start(request)
    rig.engine.runs.clear()
    proposer = lossless.DRAFTS["perfect"](rig, truth)
    run = lossless.generate(rig, request, 25, proposer=proposer, length=5)
    runs = rig.engine.runs
    first = next(i for i, call in enumerate(runs) if call.graph == "head")  # prefill ends with the head
    after = runs[first + 1 :]
    trunk = [call.width for call in after if call.graph == "segment.0"]
    tail = [call.width for call in after if call.graph == "segment.1"]
    assert run.stats.cycles == len(tail) == 4 and tail == [6, 6, 6, 6]
    assert trunk == [1] * 24, "a drafted token went through the trunk other than once"
    assert not [call for call in after if call.graph in ("commit", "encoder", "cross_kv", "vision")]


@pytest.mark.parametrize("family", FAMILIES)
def test_addresses_stay_and_nothing_is_allocated_after_the_first_requests(
    rigs: Callable, family: str
) -> None:
    rig: Rig = rigs(family, "device")
    device: RecordingDevice = rig.engine
    request = rig.request(52, 9)
    truth = rig.oracle.greedy(request, 20)
    allocated = 0
    for number in range(4):
        lossless.generate(rig, request, 20, proposer=lossless.DRAFTS["often-right"](rig, truth), length=4)
        if number == 0:
            allocated = device.allocations
            device.runs.clear()
    assert device.allocations == allocated
    seen: dict[str, set[int]] = {}
    for call in device.runs:
        for name, address in call.addresses.items():
            if "_cache." in name:
                seen.setdefault(name.removeprefix("updated_"), set()).add(address)
    assert len(seen) == 2 * rig.manifest.decoder.num_layers
    assert all(len(addresses) == 1 for addresses in seen.values()), seen
    assert len(set.union(*seen.values())) == len(seen), "two caches at one address"


# --- the device's own checks ---


class Bench:
    """A device with one segment's buffers, bound by hand."""

    def __init__(self, rig: Rig) -> None:
        self.device = RecordingDevice(rig.manifest, rig.oracle.model)
        self.graph, self.width, self.capacity = "segment.0", 2, rig.limits.max_length + rig.limits.max_width
        info = rig.manifest.graphs[self.graph]
        sizes = {"batch": 1, "width": self.width, "cache": self.capacity, "source": 4}
        self.inputs = {
            v.name: self.new(v.name, [sizes.get(d, d) for d in v.shape], v.dtype) for v in info.inputs
        }
        self.outputs = {
            v.name: self.inputs[v.name.removeprefix("updated_")]
            if v.name.startswith("updated_")
            else self.new(v.name, [sizes.get(d, d) for d in v.shape], v.dtype)
            for v in info.outputs
        }

    def new(self, name: str, shape: Any, dtype: str) -> View:
        """A buffer of its own."""
        return self.device.view(self.device.allocate(name, tuple(shape), dtype), tuple(shape))

    def show(self, *slots: int) -> None:
        """Makes these cache slots visible to every row."""
        mask = self.inputs["attn_mask"]
        values = (
            np.zeros(mask.shape, bool) if mask.dtype == "bool" else np.full(mask.shape, -3e38, np.float32)
        )
        values[..., list(slots)] = True if mask.dtype == "bool" else 0
        self.device.write(mask, values)

    def at(self, start: int) -> None:
        """Sets the write index."""
        self.device.write(self.inputs["write_indices"], np.array([start], np.int64))

    def bind(self) -> Any:
        """The call."""
        return self.device.bind(self.graph, self.inputs, self.outputs)


def updated_cache_elsewhere(bench: Bench) -> None:
    view = bench.outputs["updated_key_cache.0"]
    bench.outputs["updated_key_cache.0"] = bench.new("other", view.shape, view.dtype)
    bench.bind()


def caches_share_memory(bench: Bench) -> None:
    bench.inputs["value_cache.0"] = bench.outputs["updated_value_cache.0"] = bench.inputs["key_cache.0"]
    bench.bind()


def output_over_input(bench: Bench) -> None:
    bench.outputs["hidden_out"] = bench.inputs["hidden"]
    bench.bind()


def input_left_out(bench: Bench) -> None:
    del bench.inputs["attn_mask"]
    bench.bind()


def shorter_cache(bench: Bench) -> None:
    for name in ("key_cache.0", "value_cache.0"):
        buffer, shape = bench.inputs[name].buffer, list(bench.inputs[name].shape)
        shape[2] = 128
        bench.inputs[name] = bench.outputs["updated_" + name] = bench.device.view(buffer, tuple(shape))
    mask = bench.inputs["attn_mask"]
    bench.inputs["attn_mask"] = bench.new("mask", (*mask.shape[:3], 128), mask.dtype)
    bench.bind()


def wrong_dtype(bench: Bench) -> None:
    bench.inputs["write_indices"] = bench.new("indices", (1,), "int32")
    bench.bind()


def host_memory_bound(bench: Bench) -> None:
    array = np.zeros((1, bench.width, bench.inputs["hidden"].shape[2]), np.float32)
    buffer = Buffer("host", array.shape, "float32", array.ctypes.data, array.reshape(-1))
    bench.inputs["hidden"] = View(buffer, array.shape)
    bench.bind()


def write_beyond_the_end(bench: Bench) -> None:
    bench.show(0, 1)
    bench.at(bench.capacity - 1)
    bench.bind().run()


def unwritten_row_visible(bench: Bench) -> None:
    bench.show(0, 1, 2)
    bench.at(0)
    bench.bind().run()


def wrong_shape_written(bench: Bench) -> None:
    bench.device.write(bench.inputs["write_indices"], np.array(0, np.int64))


VIOLATIONS = (
    updated_cache_elsewhere, caches_share_memory, output_over_input, input_left_out, shorter_cache, wrong_dtype,
    host_memory_bound, write_beyond_the_end, unwritten_row_visible, wrong_shape_written,
)  # fmt: skip


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_refuses(rigs: Callable, family: str, violation: Callable[[Bench], None]) -> None:
    bench = Bench(rigs(family, "device"))
    with pytest.raises(AssertionError):
        violation(bench)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_accepts_what_is_right(rigs: Callable, family: str) -> None:
    bench = Bench(rigs(family, "device"))
    bench.show(0, 1)
    bench.at(0)
    if "cross_mask" in bench.inputs:
        bench.device.write(bench.inputs["cross_mask"], np.ones(bench.inputs["cross_mask"].shape, bool))
    bench.bind().run()
    bench.at(bench.capacity - 2)
    bench.bind().run()


def test_what_was_read_is_a_copy(rigs: Callable) -> None:
    bench = Bench(rigs("llama", "device"))
    values = bench.device.read(bench.inputs["hidden"])
    with pytest.raises(ValueError, match="read-only"):
        values[...] = 1
    assert bench.inputs["hidden"].buffer.data is None
