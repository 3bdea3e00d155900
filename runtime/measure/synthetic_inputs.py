"""Values for a graph's inputs that cost what real ones cost: everything visible, no zeros or denormals in hidden
states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..bundle.manifest import FLOATS
from ..common.bfloat16 import widen
from ..engines.base import DTYPES


def stand_in(
    name: str, dtype: str, shape: tuple[int, ...], sizes: Mapping[str, int], rng: np.random.Generator
) -> np.ndarray | None:
    """Values of `dtype` (bfloat16 as bits) for the input `name`, None for zeros; `sizes` has `width` and
    `cache`, and `max_positions` where positions are rows of a table: a cache may be longer."""
    if dtype == "bool":
        return None if name == "banned" else np.ones(shape, bool)
    if name == "row_index":
        return np.arange(sizes["width"] - shape[0], sizes["width"], dtype=np.int64)
    if name == "end":  # of a text that fills the cache
        return np.full(shape, sizes["cache"] - sizes["width"], np.int64)
    if name == "positions":
        end = min(sizes["cache"], sizes.get("max_positions", sizes["cache"]))
        positions = np.arange(end - sizes["width"], end, dtype=np.int64).clip(0)
        return np.ascontiguousarray(np.broadcast_to(positions, shape))
    if name.endswith("mask") or dtype not in FLOATS:
        return None  # a float mask of zeros shows everything; slot 0 of a cache costs what any slot does
    return widen(rng.standard_normal(shape, dtype=np.float32), DTYPES[dtype])


def pass_sizes(width: int, num_logits: int | None = None) -> dict[str, int]:
    """Dimensions of a graph over `width` new positions that follow from them. `num_logits`: positions that the head sees, by
    default all."""
    return dict.fromkeys(("width", "span", "sources", "visual"), width) | {"rows": num_logits or width}


def named_sizes(
    inputs: Iterable[tuple[str, tuple[int | str, ...]]], given: Mapping[str, np.ndarray]
) -> dict[str, int]:
    """The sizes of symbolic dimensions that given arrays imply, from (name, shape) of a graph's inputs."""
    return {
        dimension: size
        for name, shape in inputs
        if name in given
        for dimension, size in zip(shape, given[name].shape, strict=True)
        if isinstance(dimension, str)
    }
