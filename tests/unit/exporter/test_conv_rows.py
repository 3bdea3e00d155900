"""Rows of a convolution in a graph: against torch's own convolution, lowered, and where the device says which to read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from vlmexport.exporter.graphs.caches import ConvCache
from vlmexport.exporter.graphs.commit import build_commit
from vlmexport.exporter.graphs.mask import build_mask
from vlmexport.exporter.graphs.traced_module import TraceInput, trace
from vlmexport.exporter.graphs.weights import WeightStore
from vlmexport.exporter.lowering import lower
from vlmexport.runtime.decoder.conv_slots import ConvSlots
from vlmexport.runtime.decoder.masks import relations
from vlmexport.runtime.decoder.token_tree import TokenTree

from tests.support.onnx_session import onnx_session
from tests.unit.runtime.test_conv_slots import decoder

Arrays = dict[str, np.ndarray]
WIDTH, KERNEL, CACHE = 6, 4, 24


def ran(model: ir.Model, feeds: Arrays) -> Arrays:
    session = onnx_session(ir.to_proto(model).SerializeToString())
    names = [value.name for value in session.get_outputs()]
    given = {value.name: feeds[value.name] for value in session.get_inputs()}
    results = session.run(names, given)
    return {name: np.asarray(value) for name, value in zip(names, results, strict=True)}


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.conv = torch.nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH, padding=KERNEL - 1)
        with torch.no_grad():
            for value in self.conv.parameters():
                value.normal_(generator=generator)


def whole(module: Convolution, rows: np.ndarray) -> np.ndarray:
    """torch's convolution of a sequence [n, C]."""
    given = torch.from_numpy(rows).T[None]
    with torch.no_grad():
        return module.conv(given)[0, :, : len(rows)].T.numpy()


def run_layer(module: Any, new: Any, write: Any, slots: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cache = ConvCache(rows, write, slots)
    return cache.convolved(new, module.conv.weight, module.conv.bias), cache.rows


@pytest.fixture(scope="module")
def graph() -> tuple[Convolution, ir.Model]:
    """A convolution over cached rows, traced as a layer is, with its weights as constants."""
    module = Convolution()
    inputs = [
        TraceInput("new", ("batch", "width", WIDTH)),
        TraceInput("write_indices", ("batch",), torch.int64),
        TraceInput("conv_slots", ("batch", "width", KERNEL - 1), torch.int64),
        TraceInput("conv_cache.0", ("batch", 1, "cache", WIDTH)),
    ]
    template = trace(module, run_layer, inputs, ("out", "updated_conv_cache.0"))
    made = template.graph
    for value in list(made.inputs):
        if value.name is None or value.name not in template.weights:
            continue
        (name,) = template.weights[value.name].parameters
        made.inputs.remove(value)
        value.const_value = ir.tensor(module.get_parameter(name).detach().numpy(), name=value.name)
        made.register_initializer(value)
    return module, ir.Model(made, ir_version=10)


def passes(
    graph: ir.Model, lowered: bool, rows: np.ndarray, trees: list[TokenTree], starts: list[int]
) -> Arrays:
    """One pass over trees behind `starts` cached rows of two sequences, whose nodes' rows are `rows` [2, n, C]."""
    width, slots = len(trees[0]), np.empty((2, len(trees[0]), KERNEL - 1), np.int64)
    cache = np.full((2, 1, CACHE, WIDTH), np.nan, np.float32)
    for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
        cache[row, 0, :start] = history(row)[:start]
        ConvSlots(CACHE, KERNEL).tree(slots, row, start, tree)
    feeds = {
        "new": rows[:, :width], "write_indices": np.array(starts), "conv_slots": slots, "conv_cache.0": cache,
    }  # fmt: skip
    return ran(lower(graph) if lowered else graph, feeds)


def history(row: int) -> np.ndarray:
    return np.random.default_rng(row).standard_normal((CACHE, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("starts", [(0, 9), (1, 3), (2, 0)])
def test_a_tree_is_convolved_along_each_way(
    graph: tuple[Convolution, ir.Model], lowered: bool, starts: tuple[int, int]
) -> None:
    """Stale rows are no numbers: whoever reads one shows it."""
    module, model = graph
    tree = TokenTree(list(range(7)), [-1, 0, 0, 2, 1, 3, 5])
    new = np.random.default_rng(7).standard_normal((2, 7, WIDTH)).astype(np.float32)
    outputs = passes(model, lowered, new, [tree, tree], list(starts))
    for row, start in enumerate(starts):
        for node in range(7):
            path = np.flatnonzero(tree.ancestors[node])
            text = np.concatenate([history(row)[:start], new[row, path]])
            expected = whole(module, text)[-1]
            np.testing.assert_allclose(outputs["out"][row, node], expected, rtol=1e-5, atol=1e-5)
        if lowered:
            assert np.array_equal(outputs["new_conv.0"][row, 0], new[row])
        else:
            written = outputs["updated_conv_cache.0"][row, 0]
            assert np.array_equal(written[start : start + 7], new[row])


def test_the_device_finds_the_same_slots() -> None:
    """Whole trees, and the last nodes alone, behind lengths below and above the kernel."""
    info = decoder(conv_kernel=KERNEL)
    store = WeightStore([], SimpleNamespace(decoder=info, cache_dtype="float32", compute_dtype="float32"))  # type: ignore[arg-type]
    model = build_mask(store, info)
    trees = [TokenTree(list(range(6)), [-1, 0, 0, 2, 1, 3]), TokenTree.chain([0, 1, 2])]
    for starts in ((0, 9), (1, 2), (17, 0)):
        expected = np.empty((2, 6, KERNEL - 1), np.int64)
        for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
            ConvSlots(CACHE, KERNEL).tree(expected[row : row + 1], 0, start, tree)
        depths, ancestors = (np.stack(each) for each in zip(*(relations(t, 6) for t in trees), strict=True))
        feeds = {
            "start": np.array(starts), "slots": np.arange(CACHE), "slot_depths": depths,
            "first_positions": np.array(starts),
        }  # fmt: skip
        for nodes in (slice(0, 6), slice(4, 6)):
            own = {"depths": depths[:, nodes], "ancestors": ancestors[:, nodes]}
            assert np.array_equal(ran(model, feeds | own)["conv_slots"], expected[:, nodes])


@pytest.mark.parametrize("lowered", [False, True])
def test_commit_moves_every_cache(lowered: bool) -> None:
    info = decoder()
    store = WeightStore([], SimpleNamespace(decoder=info, cache_dtype="float32", compute_dtype="float32"))  # type: ignore[arg-type]
    model = build_commit(store, range(4), info)
    shapes = {"conv_cache": (1, 12), "key_cache": (2, 3), "value_cache": (2, 3)}
    kinds = {0: ["conv_cache"], 1: ["conv_cache"], 2: ["key_cache", "value_cache"], 3: ["conv_cache"]}
    rng = np.random.default_rng(1)
    caches = {
        f"{name}.{i}": rng.standard_normal((2, shapes[name][0], 10, shapes[name][1]), np.float32)
        for i, names in kinds.items()
        for name in names
    }
    source, write = np.array([[4, 6], [3, 7]]), np.array([3, 2])
    outputs = ran(
        lower(model) if lowered else model, {"source_rows": source, "write_indices": write, **caches}
    )
    assert len(outputs) == len(caches)
    for name, cache in caches.items():
        for row in range(2):
            moved = cache[row][:, source[row]]
            if lowered:
                assert np.array_equal(outputs["new_" + name.replace("_cache", "")][row], moved)
            else:
                assert np.array_equal(outputs[f"updated_{name}"][row][:, write[row] : write[row] + 2], moved)
