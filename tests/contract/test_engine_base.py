"""What every engine promises about memory and bindings, whatever it executes graphs with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.bundle.manifest import GraphInfo, ValueInfo
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.engines.base import DTYPES, Buffer, Call, Engine, View, dtype_name

from tests.support.engines import memory
from tests.support.rig import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_bundle: Callable, oracle_for: Callable) -> Engine:
    """A new engine of every column, on the Llama bundle."""
    return ENGINES[request.param](tiny_bundle("llama"), oracle_for("llama"))


def values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Bytes that differ, in any dtype."""
    count = int(np.prod(shape)) * DTYPES[dtype].itemsize
    raw = (np.arange(count) * 7 + 1).astype(np.uint8)
    return (raw & 1 if dtype == "bool" else raw & 0x3F).view(DTYPES[dtype]).reshape(shape)


# --- memory ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_bytes_are_read_back(engine: Engine, dtype: str) -> None:
    buffer = engine.allocate("some", 4096)
    first, second = buffer.view((2, 3, 4), dtype), buffer.view((5,), dtype, 24)
    one, other = values((2, 3, 4), dtype), values((5,), dtype)
    engine.write(first, one)
    engine.write(second, other)
    assert np.array_equal(engine.read(first), one) and np.array_equal(engine.read(second), other)
    assert engine.read(first).dtype == DTYPES[dtype] and engine.read(first).shape == (2, 3, 4)


def test_one_buffer_is_seen_in_any_dtype(engine: Engine) -> None:
    buffer = engine.allocate("some", 256)
    array = values((8,), "float32")
    engine.write(buffer.view((8,), "float32"), array)
    assert np.array_equal(engine.read(buffer.view((32,), "uint8")), array.view(np.uint8))
    assert np.array_equal(engine.read(buffer.view((2,), "int64", 1)), array.view(np.int64)[1:3])


def test_memory_is_zero_where_asked_for_and_aligned(engine: Engine) -> None:
    buffers = [engine.allocate(f"buffer {size}", size, zeroed=True) for size in (1, 8, 100, 4097)]
    for buffer in buffers:
        assert buffer.address % max(8, engine.alignment) == 0
        assert not engine.read(buffer.view((buffer.nbytes,), "uint8")).any()
    ends = sorted((buffer.address, buffer.address + buffer.nbytes) for buffer in buffers)
    assert all(before[1] <= after[0] for before, after in pairwise(ends)), "buffers overlap"


def test_read_arrays_stay_valid(engine: Engine) -> None:
    view = engine.allocate("some", 64).view((4,), "int64")
    engine.write(view, np.arange(4))
    seen = engine.read(view)
    engine.write(view, np.arange(4) + 10)
    assert seen.tolist() == ([10, 11, 12, 13] if engine.host_memory else [0, 1, 2, 3])


def test_copies_move_bytes_in_order(engine: Engine) -> None:
    buffer = engine.allocate("some", 4 * 100)
    source, middle = buffer.view((2, 3), "float32"), buffer.view((6,), "float32", 17)
    end = buffer.view((6,), "int32", 40)  # the same bytes, whatever they are called
    array = values((2, 3), "float32")
    forth, back = engine.copy(middle, source), engine.copy(end, middle)
    engine.write(source, array)
    forth.run()
    back.run()
    engine.write(source, np.zeros((2, 3), np.float32))
    assert np.array_equal(engine.read(end), array.view(np.int32).reshape(-1))
    forth.run()  # a call may run again, with what is there now
    assert not engine.read(middle).any()
    with pytest.raises(ValueError, match="24 bytes into 20"):
        engine.copy(buffer.view((5,), "float32", 50), source)


@pytest.mark.parametrize("dtype", ("float32", "float16", "uint16", "int8"))
def test_constants(engine: Engine, dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    view = engine.constant("table", array)
    assert view.dtype == {"uint16": "bfloat16"}.get(dtype, dtype) and view.shape == (3, 4)
    assert np.array_equal(engine.read(view), array)


def test_views_stay_in_their_buffer(engine: Engine) -> None:
    buffer = engine.allocate("some", 40)
    assert buffer.view((5,), "int64").nbytes == 40 and buffer.view((), "int64", 4).size == 1
    assert buffer.view((2, 4), "float32", 2).address == buffer.address + 8
    for shape, dtype, offset in (
        ((6,), "int64", 0),
        ((10,), "float32", 1),
        ((1,), "uint8", 40),
        ((1,), "int8", -1),
    ):
        with pytest.raises(ValueError, match="leaves buffer 'some' of 40 bytes"):
            buffer.view(shape, dtype, offset)


# --- interfaces ---


def test_dtypes_of_a_graph(engine: Engine) -> None:
    assert engine.dtype("head", "row_index") == "int64" and engine.dtype("head", "logits") == "float32"
    with pytest.raises(BundleError, match="'nothing'"):
        engine.dtype("head", "nothing")
    with pytest.raises(
        BundleError, match="no graph 'tail'; it has commit, eagle, eagle3, embed, fusion, head"
    ):
        engine.interface("tail")


def test_a_dtype_that_engines_do_not_hold() -> None:
    with pytest.raises(ValueError, match="hold no float64"):
        dtype_name(np.zeros(2))


def test_bindings_fit_the_interface(engine: Engine) -> None:
    info = engine.interface("segment.0")
    sizes = {"batch": 1, "width": 2, "cache": 180}

    def new(value: Any) -> View:
        shape = tuple(sizes.get(size, size) for size in value.shape)
        return engine.allocate(value.name, 4 * int(np.prod(shape)) + 4096, zeroed=True).view(
            shape, value.dtype
        )

    inputs = {value.name: new(value) for value in info.inputs}
    outputs = {
        value.name: inputs.get(value.name.removeprefix("updated_")) or new(value) for value in info.outputs
    }
    engine.bind("segment.0", inputs, outputs)

    def refused(
        match: str,
        more_inputs: Mapping[str, View] = {},
        more_outputs: Mapping[str, View] = {},
        less: str = "",
    ):
        with pytest.raises(ValueError, match=match):
            engine.bind(
                "segment.0",
                {k: v for k, v in (inputs | dict(more_inputs)).items() if k != less},
                {k: v for k, v in (outputs | dict(more_outputs)).items() if k != less},
            )

    refused("do not fit its interface: attn_mask", less="attn_mask")
    refused("do not fit its interface: extra", {"extra": inputs["hidden"]})
    refused("do not fit its interface: surprise", more_outputs={"surprise": outputs["hidden_out"]})
    refused("updated_key_cache.0 must be bound", less="updated_key_cache.0")
    refused("updated_value_cache.0 must be", more_outputs={"updated_value_cache.0": inputs["key_cache.0"]})
    if engine.alignment > 1:
        off = inputs["hidden"].buffer.view(inputs["hidden"].shape, "float32", 1)
        refused(f"hidden at .* is not {engine.alignment}-aligned", {"hidden": off})
    with pytest.raises(BundleError, match="has no graph"):
        engine.bind("segment.9", inputs, outputs)


def test_unneeded_outputs_may_be_unbound(engine: Engine) -> None:
    """The head of an engine may offer more than logits; whoever binds it takes what it wants."""
    info = engine.interface("head")
    offered = {value.name for value in info.outputs}
    size, vocabulary = info.inputs[0].shape[-1], info.outputs[0].shape[-1]
    hidden = engine.allocate("hidden", 3 * size * 4).view((1, 3, size), "float32")
    rows = engine.allocate("rows", 16).view((2,), "int64")
    engine.write(hidden, np.random.default_rng(1).standard_normal((1, 3, size), np.float32))
    engine.write(rows, np.array([2, 0]))
    inputs = {"hidden": hidden, "row_index": rows}
    logits = engine.allocate("logits", 2 * vocabulary * 4).view((2, vocabulary), "float32")
    engine.bind("head", inputs, {"logits": logits}).run()
    want = np.array(engine.read(logits))
    assert want.std() > 1
    if "best" not in offered:
        return
    best = engine.allocate("best", 16).view((2,), "int64")
    finite = engine.allocate("finite", 2).view((2,), "bool")
    call = engine.bind("head", inputs, {"best": best, "finite": finite})
    call.run()
    assert (
        engine.read(best).tolist() == want.argmax(-1).tolist() and engine.read(finite).tolist() == [True] * 2
    )
    broken = np.array(engine.read(hidden))
    broken[0, 0, 3] = np.nan
    engine.write(hidden, broken)
    call.run()
    assert engine.read(finite).tolist() == [True, False]


# --- the defaults of the base class ---


class Plain(Engine):
    """An engine that overrides nothing that it need not."""

    name = "plain"

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        return memory.allocate(name, nbytes, zeroed)

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        raise AssertionError("nothing to bind")

    def write(self, view: View, array: np.ndarray) -> None:
        memory.array(view)[...] = array

    def read(self, view: View) -> np.ndarray:
        return memory.array(view).copy()


def test_defaults() -> None:
    value = ValueInfo(name="x", dtype="int8", shape=["n"])
    plain = Plain({"g": GraphInfo(file="g.onnx", role="other", inputs=[value], outputs=[value])})
    assert (plain.static_cache, plain.host_memory, plain.alignment, plain.threads) == (False, False, 1, None)
    plain.load("g")
    table = plain.constant("table", np.arange(6, dtype=np.int8))
    target = plain.allocate("target", 8).view((6,), "int8", 2)
    plain.copy(target, table).run()
    assert plain.read(target).tolist() == [0, 1, 2, 3, 4, 5]
    plain.close()
    plain.close()


def test_an_engine_without_memory_and_calls_cannot_be_made() -> None:
    class Half(Engine):
        name = "half"

    with pytest.raises(TypeError, match="abstract"):
        Half({})  # type: ignore[abstract]
