"""A bundle's graphs and their lowered copies side by side on ONNX Runtime, given the same passes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from vlmexport.exporter.lowering import lower, new_name
from vlmexport.runtime.bundle.manifest import GraphInfo, Manifest
from vlmexport.runtime.decoder.conv_slots import ConvSlots
from vlmexport.runtime.decoder.masks import CausalMask
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.engines.base import DTYPES
from vlmexport.runtime.engines.kv_append import NEW_MASKS, split_mask
from vlmexport.runtime.graphs.values import CONV_SLOTS, MASKS

from tests.support.tiny_bundles import TinyBundle

Arrays = dict[str, np.ndarray]

SIZES = {
    "source": 11,
    "rows": 5,
    "units": 6,
    "windows": 3,
    "tiles": 3,
    "sources": 7,
    "visual": 3,
    "image_rows": 9,
}
"""Of what is no part of a pass; `units` of 4 patches each are cut into `windows`."""

GARBAGE = 1e3
"""What stale rows hold: finite, since a hidden row is multiplied by zero, and far too large to go unseen."""


@dataclass(frozen=True)
class Pass:
    """Of some sequences: where each writes its rows, and their parents (None: a chain)."""

    starts: tuple[int, ...]
    width: int
    parents: tuple[int, ...] | None = None
    cache: int = 128

    @property
    def trees(self) -> list[TokenTree]:
        parents = list(range(-1, self.width - 1)) if self.parents is None else list(self.parents)
        return [TokenTree(list(range(self.width)), parents)] * len(self.starts)


PASSES = {
    "prefill": Pass((0,), 48),
    "one token": Pass((37,), 1),
    "the last rows": Pass((108,), 20),
    "wide": Pass((60,), 16),
    "tree": Pass((41,), 9, (-1, 0, 0, 1, 1, 2, 3, 3, 7)),
    "ragged batch": Pass((3, 90, 0, 57), 6),
    "ragged trees": Pass((5, 100, 31), 7, (-1, 0, 0, 2, 2, 4, 1)),
    "a short cache": Pass((2, 20), 4, cache=32),
}
COMMIT = Pass((40, 11), 5)


def lowered_file(bundle: Path, file: str, folder: Path) -> Path:
    """The lowered copy of a graph in `folder`, with a link to the weights beside it."""
    if not (folder / "weights.bin").exists():
        os.link(bundle / "weights.bin", folder / "weights.bin")
    lowered = lower(ir.from_proto(onnx.load(str(bundle / file), load_external_data=False)))
    path = folder / file
    path.write_bytes(ir.to_proto(lowered).SerializeToString())
    return path


def causal_mask(manifest: Manifest, bundle: TinyBundle, graph: GraphInfo, run: Pass, name: str) -> np.ndarray:
    """What the runtime fills in for an input, [batch, heads, width, cache]; the layer of a draft has no bias."""
    decoder, bias = manifest.decoder, manifest.decoder.relative_bias
    heads, dtype = decoder.mask_heads, DTYPES[decoder.mask_dtype]
    if graph.role not in ("segment", "skipped"):
        heads, dtype, bias = 1, DTYPES["bool"], None
    table = None if bias is None else np.asarray(bundle.bundle.tensor(bias.tensor))
    window = decoder.sliding_window if name == MASKS["sliding_attention"] else None
    made = CausalMask(run.cache, heads, dtype, table, bias.max_distance if bias else 128, window)
    mask = np.empty((len(run.starts), heads, run.width, run.cache), dtype)
    for row, (start, tree) in enumerate(zip(run.starts, run.trees, strict=True)):
        made.chain(mask, row, start, run.width) if tree.is_chain else made.tree(mask, row, start, tree)
    return mask


def inputs(manifest: Manifest, tiny: TinyBundle, graph: GraphInfo, run: Pass, seed: int) -> Arrays:
    """Of one run of a graph as it stands in the bundle."""
    rng = np.random.default_rng(seed)
    sizes = {**SIZES, "batch": len(run.starts), "width": run.width, "span": run.width, "cache": run.cache,
             "distances": run.cache + 1}  # fmt: skip
    found: Arrays = {}
    for value in graph.inputs:
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in value.shape)
        dtype = DTYPES[value.dtype]
        if value.name in MASKS.values():
            array = causal_mask(manifest, tiny, graph, run, value.name)
        elif value.name == CONV_SLOTS:
            array = np.empty(shape, np.int64)
            written = ConvSlots(run.cache, shape[2] + 1)
            for row, (start, tree) in enumerate(zip(run.starts, run.trees, strict=True)):
                written.tree(array, row, start, tree)
        elif value.name == "write_indices":
            array = np.array(run.starts, np.int64)
        elif value.name == "positions":
            rows = [
                start + np.asarray(tree.depths) for start, tree in zip(run.starts, run.trees, strict=True)
            ]
            array = np.broadcast_to(np.stack(rows), shape).copy()
        elif value.name == "source_rows":
            array = rng.integers(0, run.cache, shape)
        elif value.name == "token_ids":
            array = rng.integers(0, manifest.text.vocab_size, shape)
        elif value.name == "embedding_table":
            array = np.asarray(tiny.bundle.tensor("embedding_table"))
        elif value.name == "cross_mask":
            array = np.arange(shape[-1]) < rng.integers(4, shape[-1], (shape[0], 1, 1, 1))
            array = np.broadcast_to(array, shape).copy()
        elif dtype == np.int64:
            array = rng.integers(0, 3, shape)
        elif dtype == np.bool_:
            array = rng.random(shape) < 0.5 if value.name == "banned" else np.ones(shape, bool)
        else:
            array = rng.standard_normal(shape, np.float32).astype(dtype)
        found[value.name] = array
    for name, array in found.items():
        if "_cache." in name and graph.role != "commit":
            spoil(array, run.starts, GARBAGE)
    return found


def spoil(cache: np.ndarray, starts: Sequence[int], number: float) -> None:
    """Stale rows: whatever lies from a sequence's next row on."""
    for row, start in enumerate(starts):
        cache[row, :, start:] = number


def lowered_inputs(given: Mapping[str, np.ndarray], run: Pass) -> Arrays:
    """The same run for the lowered graph."""
    found = dict(given)
    if CONV_SLOTS not in found:
        found.pop("write_indices", None)
    for name, new in NEW_MASKS.items():
        if name in found:
            found[name], found[new] = split_mask(found[name], run.starts)
    return found


def lowered_outputs(outputs: Mapping[str, np.ndarray], run: Pass) -> Arrays:
    """What a graph of the bundle gave, as its lowered copy gives it: of the caches, the rows that were written."""
    found: Arrays = {}
    for name, array in outputs.items():
        if name.startswith("updated_"):
            rows = [array[b, :, start : start + run.width] for b, start in enumerate(run.starts)]
            found[new_name(name)] = np.stack(rows)
        else:
            found[name] = array
    return found


def ran(made: ort.InferenceSession, given: Mapping[str, np.ndarray]) -> Arrays:
    """Outputs by name; uint16 holds the bits of bfloat16."""
    feeds = {
        name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, 16)
        if array.dtype == np.uint16
        else ort.OrtValue.ortvalue_from_numpy(array)
        for name, array in given.items()
    }
    names = [value.name for value in made.get_outputs()]
    return {
        name: value.numpy() for name, value in zip(names, made.run_with_ort_values(names, feeds), strict=True)
    }
