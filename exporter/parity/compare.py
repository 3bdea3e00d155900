"""Each graph against what the reference computed for the same input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.interfaces import positions_shape
from ...runtime.bundle.manifest import GraphInfo, RelativeBias
from ...runtime.decode.masks import CausalMask, encoder_mask
from ...runtime.engines.base import DTYPES
from ..drafts.base import Draft
from .capture import Captured
from .runner import GraphRunner

log = logging.getLogger(__name__)

SPARE = 3
"""Cache rows beyond the sequence, filled with noise that the mask must hide."""

LIMIT = 2e-4
"""Largest accepted difference, relative to the largest reference value (at least 1), float32 graphs."""


@dataclass
class ParityRow:
    """What was compared for one graph. `relative_difference` decides."""

    graph: str
    reference: str
    inputs: str
    values: int
    max_abs_difference: float
    relative_difference: float
    limit: float = LIMIT

    @property
    def ok(self) -> bool:
        """Within the limit (a NaN is not)."""
        return bool(self.relative_difference <= self.limit)

    def to_dict(self) -> dict[str, Any]:
        """The manifest's entry."""
        return {
            "graph": self.graph,
            "reference": self.reference,
            "inputs": self.inputs,
            "values": self.values,
            "max_abs_difference": float(self.max_abs_difference),
            "relative_difference": float(self.relative_difference),
            "limit": self.limit,
        }


class _Tally:
    """Collects differences of one graph."""

    def __init__(self) -> None:
        self.values = 0
        self.absolute = 0.0
        self.relative = 0.0

    def add(self, found: np.ndarray, expected: np.ndarray) -> None:
        if found.shape != expected.shape:
            self.absolute = self.relative = float("inf")
            return
        difference = float(np.max(np.abs(found.astype(np.float64) - expected))) if found.size else 0.0
        if not np.isfinite(difference):
            difference = float("inf")
        scale = max(1.0, float(np.max(np.abs(expected)))) if found.size else 1.0
        self.values += found.size
        self.absolute = max(self.absolute, difference)
        self.relative = max(self.relative, difference / scale)


def compare_graphs(
    bundle: Bundle,
    runner: GraphRunner,
    captures: list[Captured],
    drafts: Sequence[Draft],
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ParityRow]:
    """One row per graph, over all captured inputs; a draft's graph only where its draft is among `drafts`."""
    rows = []
    graphs = bundle.manifest.graphs
    owners = {name: draft for draft in drafts for name in draft.graph_names().values()}
    for done, (name, graph) in enumerate(graphs.items()):
        if progress:
            progress(name, done, len(graphs))
        tally = _Tally()
        reference = "torch"
        if graph.role == "commit":
            reference = "numpy"
            _commit(bundle, runner, graph, tally)
        elif name in owners:
            run = partial(runner.run, graph.file)
            for found, expected in owners[name].parity(name, run, captures):
                tally.add(found, expected)
        elif graph.role not in _COMPARERS:
            continue  # of a draft that is not at hand
        else:
            for captured in captures:
                _COMPARERS[graph.role](bundle, runner, graph, captured, tally)
        inputs = "+".join(c.name for c in captures) if graph.role != "commit" else "random"
        limit = 0.0 if graph.role in ("commit", "embed") else LIMIT
        rows.append(ParityRow(name, reference, inputs, tally.values, tally.absolute, tally.relative, limit))
        log.debug("%s: %d values, largest difference %.2g", name, tally.values, tally.absolute)
    if progress:
        progress("", len(graphs), len(graphs))
    return rows


def _vision(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: _Tally) -> None:
    assert c.image_rows is not None
    width = c.image_rows.shape[-1]
    found = [runner.run(graph.file, inputs)["image_rows"].reshape(-1, width) for inputs in c.vision]
    tally.add(np.concatenate(found), c.image_rows.reshape(-1, width))


def _encoder(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: _Tally) -> None:
    info = bundle.manifest.encoder
    assert info is not None and c.encoder_rows is not None and c.encoder_states is not None
    batch, source, _ = c.encoder_rows.shape
    mask = np.empty((batch, info.num_heads, source, source), np.float32)
    table, distance = _bias(bundle, info.relative_bias)
    encoder_mask(mask, c.source_lengths, table, distance)
    feeds = {"encoder_rows": c.encoder_rows, "encoder_mask": mask}
    tally.add(runner.run(graph.file, feeds)["encoder_states"], c.encoder_states)


def _cross_kv(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: _Tally) -> None:
    assert c.encoder_states is not None
    found = runner.run(graph.file, {"encoder_states": c.encoder_states})
    for i in range(bundle.manifest.decoder.num_layers):
        tally.add(found[f"cross_key.{i}"], c.cross_keys[i])
        tally.add(found[f"cross_value.{i}"], c.cross_values[i])


def _embed(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: _Tally) -> None:
    feeds = {"token_ids": c.token_ids, "embedding_table": bundle.tensor("embedding_table")}
    tally.add(runner.run(graph.file, feeds)["hidden"], c.embedded)


def _segment(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: _Tally) -> None:
    """The reference runs all rows at once; the graph runs them as prefill, one token, and the rest."""
    decoder = bundle.manifest.decoder
    assert graph.layers is not None
    first, last = graph.layers
    hidden, expected = c.residuals[first], c.residuals[last]
    batch, count, _ = hidden.shape
    cache_rows = count + SPARE
    noise = np.random.default_rng(3)
    shape = (batch, decoder.num_kv_heads, cache_rows, decoder.head_dim)
    caches = {
        f"{kind}_cache.{i}": noise.standard_normal(shape, np.float32)
        for kind in ("key", "value")
        for i in range(first, last)
    }
    masks = CausalMask(
        cache_rows, decoder.mask_heads, DTYPES[decoder.mask_dtype], *_bias(bundle, decoder.relative_bias)
    )
    positions = positions_shape(decoder.position, first)
    for start, end in ((0, count - 5), (count - 5, count - 4), (count - 4, count)):
        mask = np.empty((batch, decoder.mask_heads, end - start, cache_rows), DTYPES[decoder.mask_dtype])
        for row in range(batch):
            masks.chain(mask, row, start, end - start)
        feeds = {
            "hidden": np.ascontiguousarray(hidden[:, start:end]),
            "write_indices": np.full(batch, start, np.int64),
            "attn_mask": mask,
            **caches,
        }
        if positions is not None:
            sizes = tuple({"batch": batch, "width": end - start}.get(str(d), d) for d in positions)
            places = masks.positions if c.positions is None else c.positions
            feeds["positions"] = np.ascontiguousarray(
                np.broadcast_to(places[..., start:end], sizes)  # type: ignore[arg-type]
            )
        if decoder.cross_attention:
            feeds |= _cross(c, range(first, last), end - start)
        found = runner.run(graph.file, feeds)
        tally.add(found["hidden_out"], expected[:, start:end])
        caches = {name: found[f"updated_{name}"] for name in caches}
    for i in range(first, last):
        tally.add(caches[f"key_cache.{i}"][:, :, :count], c.keys[i])
        tally.add(caches[f"value_cache.{i}"][:, :, :count], c.values[i])


def _cross(c: Captured, layers: range, width: int) -> dict[str, np.ndarray]:
    """Cross-attention's keys, values and mask: a source row is visible when it is no padding."""
    source = c.cross_keys[0].shape[2]
    visible = np.arange(source) < np.array(c.source_lengths)[:, None]
    mask = np.repeat(visible[:, None, None], width, axis=2)
    feeds: dict[str, np.ndarray] = {"cross_mask": mask}
    feeds |= {f"cross_key.{i}": c.cross_keys[i] for i in layers}
    feeds |= {f"cross_value.{i}": c.cross_values[i] for i in layers}
    return feeds


def _bias(bundle: Bundle, info: RelativeBias | None) -> tuple[np.ndarray | None, int]:
    """(table of the bundle, its largest distance), as the runtime's masks take them."""
    return (None, 128) if info is None else (bundle.tensor(info.tensor), info.max_distance)


def _head(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: _Tally) -> None:
    hidden = c.residuals[bundle.manifest.decoder.num_layers]
    count = hidden.shape[0] * hidden.shape[1]
    index = np.arange(count, dtype=np.int64)[::-3].copy()
    found = runner.run(graph.file, {"hidden": hidden, "row_index": index})["logits"]
    tally.add(found, c.logits.reshape(count, -1)[index])


def _commit(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, tally: _Tally) -> None:
    decoder = bundle.manifest.decoder
    random = np.random.default_rng(5)
    shape = (2, decoder.num_kv_heads, 12, decoder.head_dim)
    names = [f"{kind}_cache.{i}" for kind in ("key", "value") for i in range(decoder.num_layers)]
    caches = {n: random.standard_normal(shape, np.float32) for n in names}
    source, write = np.array([[4, 6, 9], [3, 7, 8]], np.int64), np.array([4, 2], np.int64)
    found = runner.run(graph.file, {"source_rows": source, "write_indices": write, **caches})
    for name in names:
        expected = caches[name].copy()
        for row in range(2):
            expected[row, :, write[row] : write[row] + 3] = caches[name][row][:, source[row]]
        tally.add(found[f"updated_{name}"], expected)


_COMPARERS = {
    "vision": _vision, "encoder": _encoder, "cross_kv": _cross_kv, "embed": _embed, "segment": _segment, "head": _head,
}  # fmt: skip
