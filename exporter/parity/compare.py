"""Each graph against what the reference computed for the same input."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import GraphInfo
from ...runtime.decoder.masks import encoder_mask
from ...runtime.decoder.prompt_chunks import Block, blocks_within, prompt_chunks, widest_prefill
from ...runtime.drafts.layer_skip_options import kept_attention
from ...runtime.graphs.states import COUNTS, RECURRENT_STATE, linear_layers, sequence_states
from ...runtime.graphs.values import caches_by_name, deepstack_inputs, segment_positions, slots_read
from ..drafts.common.base import Draft
from .capture import Captured
from .host_masks import bias_of, slot_inputs_of
from .numpy_graphs import WITHOUT_MODEL
from .runner import GraphRunner
from .tally import FLOOR, SHARE, ParityRow, Tally

log = logging.getLogger(__name__)

SPARE = 3
"""Cache entries beyond the sequence, filled with noise that the mask must hide."""


def compare_graphs(
    bundle: Bundle,
    runner: GraphRunner,
    captures: list[Captured],
    drafts: Sequence[Draft],
    whole: Sequence[Draft] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ParityRow]:
    """One row per graph, over all captured inputs; a draft's graph only where its draft is among `drafts`. `whole` are
    those drafts whose matrices are stored as integers, before they became that."""
    rows = []
    graphs = bundle.manifest.graphs
    owners, unrounded = (
        {name: draft for draft in each for name in draft.graph_names().values()} for each in (drafts, whole)
    )
    for done, (name, graph) in enumerate(graphs.items()):
        if progress:
            progress(name, done, len(graphs))
        tally = Tally()
        reference = "torch"
        if graph.role in WITHOUT_MODEL:
            reference = "numpy"
            WITHOUT_MODEL[graph.role](bundle, runner, graph, tally)
        elif name in owners and graph.role not in _COMPARERS:
            run = partial(_run_with_tensors, bundle, runner, graph)
            for compared in owners[name].parity(name, run, captures):
                tally.add(*compared)
        elif graph.role not in _COMPARERS:
            continue  # of a draft that is not at hand
        else:
            for captured in captures:
                _COMPARERS[graph.role](bundle, runner, graph, captured, tally)
        inputs = "random" if graph.role in WITHOUT_MODEL else "+".join(c.name for c in captures)
        exact = graph.role == "embed" or graph.role in WITHOUT_MODEL
        limits = {} if exact else {"share": SHARE, "floor": FLOOR}
        row = tally.row(name, reference, inputs, **limits)
        if name in unrounded and graph.role not in _COMPARERS:
            row.quantization_difference = _distance(unrounded[name].parity(name, run, captures))
        rows.append(row)
        log.debug("%s: %d values, largest difference %.2g", name, row.values, row.max_abs_difference)
    if progress:
        progress("", len(graphs), len(graphs))
    return rows


def _distance(compared: Iterable[tuple[str, np.ndarray, np.ndarray, np.ndarray]]) -> float:
    """The largest difference of what `Draft.parity` compares, of the largest value of its kind."""
    tally = Tally()
    for kind, actual, expected, _ in compared:
        tally.add(kind, actual, expected)
    return tally.furthest


def _run_with_tensors(
    bundle: Bundle, runner: GraphRunner, graph: GraphInfo, feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A draft's graph on `feeds`, and on the tensors of the bundle that it takes beside them."""
    names = {value.name for value in graph.inputs} & bundle.manifest.tensors.keys() - feeds.keys()
    return runner.run(graph.file, {**feeds, **{name: bundle.tensor(name) for name in names}})


def _vision(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: Tally) -> None:
    image_embeds, error = c.image_embeds, _error(c).image_embeds
    if image_embeds is None or error is None:
        return  # text alone
    width = image_embeds.shape[-1]
    outputs = [runner.run(graph.file, inputs)["image_rows"].reshape(-1, width) for inputs in c.vision]
    tally.add("rows", np.concatenate(outputs), image_embeds.reshape(-1, width), error.reshape(-1, width))


def _encoder(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: Tally) -> None:
    assert c.encoder_states is not None
    states = run_encoder(bundle, runner, graph, c)
    tally.add("states", states, c.encoder_states, _error(c).encoder_states)


def run_encoder(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured) -> np.ndarray:
    """The text encoder's states [B, N, E] of `c.encoder_hidden`."""
    info = bundle.manifest.encoder
    assert info is not None and c.encoder_hidden is not None
    batch, source, _ = c.encoder_hidden.shape
    mask = np.empty((batch, info.num_heads, source, source), np.float32)
    table, distance = bias_of(bundle, info.relative_bias)
    encoder_mask(mask, c.source_lengths, table, distance)
    feeds = {"encoder_rows": c.encoder_hidden, "encoder_mask": mask}
    return runner.run(graph.file, feeds)["encoder_states"]


def _cross_kv(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: Tally) -> None:
    assert c.encoder_states is not None
    outputs, error = runner.run(graph.file, {"encoder_states": c.encoder_states}), _error(c)
    for i in range(bundle.manifest.decoder.num_layers):
        tally.add("keys", outputs[f"cross_key.{i}"], c.cross_keys[i], error.cross_keys[i])
        tally.add("values", outputs[f"cross_value.{i}"], c.cross_values[i], error.cross_values[i])


def _embed(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: Tally) -> None:
    tally.add("rows", run_embed(bundle, runner, graph, c.token_ids), c.embedded)


def run_embed(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, token_ids: np.ndarray) -> np.ndarray:
    """Embeddings [B, N, E] of `token_ids` int64 [B, N]."""
    return _run_with_tensors(bundle, runner, graph, {"token_ids": token_ids})["hidden"]


def _segment(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: Tally) -> None:
    assert graph.layers is not None
    _layers(bundle, runner, graph, c, tally, graph.layers, range(*graph.layers))


def _skipped(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: Tally) -> None:
    assert c.without is not None
    ends = (0, bundle.manifest.decoder.num_layers)
    _layers(bundle, runner, graph, c.without, tally, ends, kept_attention(bundle.manifest))


def _layers(
    bundle: Bundle,
    runner: GraphRunner,
    graph: GraphInfo,
    c: Captured,
    tally: Tally,
    ends: Sequence[int],
    attention: Sequence[int],
) -> None:
    """Rows after layers [first, end), and the caches of those in `attention`."""
    error, last = _error(c), ends[1]
    steps, runs = run_layers(bundle, runner, graph, c, range(*ends), attention)
    for (start, end), outputs in zip(steps, runs, strict=True):
        expected = (x.residuals[last][:, start:end] for x in (c, error))
        tally.add("hidden", outputs["hidden_out"], *expected)
    count = c.residuals[ends[0]].shape[1]
    for i in attention:
        for name, expected in c.caches[i].items():
            cache = runs[-1][f"updated_{name}.{i}"]
            if name != RECURRENT_STATE:
                cache = cache[:, :, :count]
            tally.add(name, cache, expected, error.caches[i][name])


def run_layers(
    bundle: Bundle,
    runner: GraphRunner,
    graph: GraphInfo,
    c: Captured,
    layers: range,
    attention: Sequence[int],
) -> tuple[tuple[tuple[int, int], ...], list[dict[str, np.ndarray]]]:
    """(positions [start, end) of every step, its outputs): `layers` of the decoder, of which those in `attention`
    have caches, on the hidden states that enter there. The reference runs all positions at once; the graph runs them as prefill,
    one token, and the rest, but cuts no block. A state folds a few rows later, so that passes replay some, and holds all in
    the end."""
    decoder = bundle.manifest.decoder
    first = layers[0]
    hidden = c.residuals[first]
    batch, count, _ = hidden.shape
    cache_len = count + SPARE
    noise = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.{i}": (batch, heads, cache_len, size)
        for name, own in caches_by_name(decoder, attention).items()
        for i, (heads, size) in own.items()
    }
    # One for all layers: they may be many and large.
    stale = {shape: noise.standard_normal(shape, np.float32) for shape in dict.fromkeys(shapes.values())}
    inputs, read = slot_inputs_of(bundle, cache_len), slots_read(decoder, attention)
    positions = segment_positions(decoder, first, attention)
    linear = linear_layers(decoder.layer_types, attention)
    steps = tuple(itertools.pairwise(_borders(count, itertools.chain(*c.blocks))))
    if linear:
        most = widest_prefill(decoder, bundle.manifest.limits.max_width)
        steps = (*prompt_chunks(0, max(0, count - 5), most), *steps[1:])
    held = 0
    runs: list[dict[str, np.ndarray]] = []
    for start, end in steps:
        feeds = {
            "hidden": np.ascontiguousarray(hidden[:, start:end]),
            **({"write_indices": np.full(batch, start, np.int64)} if shapes else {}),
        }
        for name in read:
            written = inputs[name].written
            feeds[name] = inputs[name].empty(batch=batch, width=end - start, cache=cache_len)
            for batch_index in range(batch):
                written.chain(feeds[name], batch_index, start, end - start)
                for block in blocks_within(c.blocks[batch_index] if c.blocks else (), start, end):
                    written.block(feeds[name], batch_index, start, *block)
        if positions is not None:
            sizes = tuple({"batch": batch, "width": end - start}.get(str(d), d) for d in positions)
            places = np.arange(cache_len) if c.positions is None else c.positions
            feeds["positions"] = np.ascontiguousarray(
                np.broadcast_to(places[..., start:end], sizes)  # type: ignore[arg-type]
            )
        for name in deepstack_inputs(decoder.deepstack_layers, layers):
            feeds[name] = np.ascontiguousarray(c.deepstack[name][:, start:end])
        if decoder.cross_attention:
            feeds |= _cross(c, attention, end - start)
        if linear:
            rows = end if end == count else max(held, end - min(2, most))
            counts = dict(zip(COUNTS, (start - held, rows - held), strict=True))
            feeds |= {name: np.full(batch, value, np.int64) for name, value in counts.items()}
            held = rows
        runs.append(feeds)
    runs[0] |= {name: stale[shape] for name, shape in shapes.items()}
    for name, (_, shape) in sequence_states(bundle.manifest, linear).items():
        shapes[name] = (batch, *shape)
        runs[0][name] = np.zeros(shapes[name], np.float32)
    return steps, runner.run_chain(graph.file, runs, {f"updated_{name}": name for name in shapes})


def _borders(count: int, blocks: Iterable[Block]) -> list[int]:
    """Where the steps over `count` positions begin and end."""
    cut = {at for first, end in blocks for at in range(first + 1, end)}
    return [at for at in (0, count - 5, count - 4, count) if at not in cut]


def _error(c: Captured) -> Captured:
    assert c.error is not None
    return c.error


def _cross(c: Captured, layers: Sequence[int], width: int) -> dict[str, np.ndarray]:
    """Cross-attention's keys, values and mask: a source token is visible when it is no padding."""
    source = c.cross_keys[0].shape[2]
    visible = np.arange(source) < np.array(c.source_lengths)[:, None]
    mask = np.repeat(visible[:, None, None], width, axis=2)
    feeds: dict[str, np.ndarray] = {"cross_mask": mask}
    feeds |= {f"cross_key.{i}": c.cross_keys[i] for i in layers}
    feeds |= {f"cross_value.{i}": c.cross_values[i] for i in layers}
    return feeds


def _head(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, c: Captured, tally: Tally) -> None:
    hidden = c.residuals[bundle.manifest.decoder.num_layers]
    count = hidden.shape[0] * hidden.shape[1]
    index = np.arange(count, dtype=np.int64)[::-3].copy()
    logits = run_head(runner, graph, hidden, index)
    tally.add("logits", logits, *(x.logits.reshape(count, -1)[index] for x in (c, _error(c))))


def run_head(runner: GraphRunner, graph: GraphInfo, hidden: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Logits [R, V] of positions of `hidden` [B, N, E], by their index int64 [R] among all."""
    return runner.run(graph.file, {"hidden": hidden, "row_index": index})["logits"]


_COMPARERS = {
    "vision": _vision, "encoder": _encoder, "cross_kv": _cross_kv, "embed": _embed, "segment": _segment, "head": _head,
    "skipped": _skipped,
}  # fmt: skip
