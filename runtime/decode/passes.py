"""Passes of the decoder: prefill, trunk, tail, full, head; the only user of the engine while decoding.

Buffers have fixed addresses, and a pass of a given shape is prepared once (calls bound, host arrays sliced), so
a step writes a row, a mask and an index, and runs. Rows beyond the arena's length are scratch: `begin_cycle`
reserves them, passes write them, `accept` makes a path of them valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..bundle.manifest import Manifest
from ..engines.base import DTYPES, Buffer, Call, Engine, View
from ..engines.buffers import HostBuffer
from ..errors import BundleError, CapacityError, PromptError
from .encoder import Encoder
from .kv import KVArena
from .masks import CausalMask
from .tree import TokenTree

PREFILL_WIDTH = 256
"""Prompt rows per pass: bounds masks and activations; longer prompts take several passes."""

PREFILL_STEP = 16
"""Prefill widths are multiples of this, so that few shapes are bound."""


class _Pass:
    """A prepared run of segments first..end−1 over [batch, width] rows. Host arrays are None where not needed."""

    __slots__ = ("calls", "hidden", "indices", "mask", "positions", "pushes", "width")

    def __init__(self, width: int):
        self.width = width
        self.calls: list[Call] = []
        self.pushes: list[tuple[HostBuffer, tuple[int, ...]]] = []
        self.hidden: np.ndarray | None = None
        self.mask: np.ndarray
        self.indices: np.ndarray
        self.positions: np.ndarray | None = None


class Decoder:
    """One model on one engine, for `max_batch` sequences of `max_length` positions.

    `tensor` reads a bundle's tensor by name (memory-mapped). Self-drafting (`trunk`, `tail`) is for one sequence;
    `full` also takes ragged batches.
    """

    def __init__(
        self,
        engine: Engine,
        manifest: Manifest,
        tensor: Callable[[str], np.ndarray],
        max_length: int | None = None,
        max_batch: int = 1,
    ):
        self.engine, self.manifest = engine, manifest
        self.max_length = manifest.limits.max_length if max_length is None else max_length
        self.max_width = manifest.limits.max_width
        if manifest.verify_width is not None:
            raise BundleError(
                f"manifest field 'verify_width': {manifest.verify_width} is not supported by engine {engine.name}"
            )
        info = self._info = manifest.decoder
        self.arena = KVArena(engine, info, self.max_length, self.max_width, max_batch, manifest.cache_dtype)
        self._segments = manifest.segments
        prefill = self.max_width if info.cross_attention else min(PREFILL_WIDTH, self.arena.capacity)
        self._widest = max(prefill, self.max_width)
        rows, size, batch = self._widest, info.hidden_size, max_batch
        head = manifest.graphs["head"]
        dtype = self._dtype = next(value.dtype for value in head.inputs if value.name == "hidden")
        self._work = [HostBuffer(engine, f"hidden.{index}", batch * rows * size, dtype) for index in range(2)]
        self._exit = engine.allocate("exit_rows", (self.max_width, size), dtype)
        self._imitated = engine.allocate("imitated_row", (1, size), dtype)
        capacity = self.arena.capacity
        self._mask = HostBuffer(
            engine, "attn_mask", batch * info.mask_heads * rows * capacity, info.mask_dtype
        )
        self._tokens = HostBuffer(engine, "token_ids", batch * rows, "int64")
        self._positions = HostBuffer(engine, "positions", batch * rows, "int64")
        self._indices = HostBuffer(engine, "write_indices", batch, "int64")
        self._row_index = HostBuffer(engine, "row_index", batch * rows, "int64")
        self._source_rows = HostBuffer(engine, "source_rows", batch * self.max_width, "int64")
        self._vocabulary = int(head.outputs[0].shape[-1])
        self._logits = engine.allocate("logits", (batch * self.max_width, self._vocabulary), "float32")
        bias = None if info.relative_bias is None else np.asarray(tensor(info.relative_bias.tensor))
        self._masks = CausalMask(
            capacity,
            info.mask_heads,
            DTYPES[info.mask_dtype],
            bias,
            info.relative_bias.max_distance if info.relative_bias else 128,
        )
        self._encoder = Encoder(engine, manifest, tensor, max_batch) if info.cross_attention else None
        self._table = tensor("embedding_table")
        self._constant = engine.constant("embedding_table", self._table)
        self._passes: dict[tuple[int, ...], _Pass] = {}
        self._heads: dict[tuple[object, ...], tuple[Call, np.ndarray | View]] = {}
        self._direct = getattr(engine, "host_memory", False)
        self._last: tuple[Buffer, int] = (self._work[0].buffer, 1)
        self.exit_count = 0
        """Rows of the trunk saved in this cycle: the pending token and the drafts that followed it."""
        # One memory-mapped row into a bound buffer takes a quarter of the time of running a graph for it; taken
        # only when the graph is a plain lookup, which the first ids decide.
        self._lookup = False
        if self._direct:
            probe = np.linspace(0, len(self._table) - 1, min(16, rows), dtype=np.int64)
            self._lookup = np.array_equal(self._run_embed(probe), self._table[probe])

    # --- one request: image rows, encoder, prefill ---

    def image_rows(self, pixel_values: np.ndarray) -> np.ndarray:
        """Run `vision` on float32 [images, 3, H, W]; rows [images × R, E] in prompt order."""
        engine, graph = self.engine, self.manifest.graphs["vision"]
        size, count = self._info.hidden_size, len(pixel_values)
        rows = self.manifest.text.image_rows or int(graph.outputs[0].shape[1])
        if not hasattr(self, "_pixels"):
            channels, height, width = (int(size) for size in graph.inputs[0].shape[1:])
            self._pixels = HostBuffer(
                engine, "pixel_values", channels * height * width, graph.inputs[0].dtype
            )
            self._image_rows = engine.allocate("image_rows", (1, rows, size), graph.outputs[0].dtype)
        out = np.empty((count, rows, size), DTYPES[graph.outputs[0].dtype])
        view = engine.view(self._image_rows, (1, rows, size))
        shape = (1, *pixel_values.shape[1:])
        call = engine.bind("vision", {"pixel_values": self._pixels.view(shape)}, {"image_rows": view})
        for index in range(count):
            self._pixels.host(shape)[0] = pixel_values[index]
            self._pixels.push(shape)
            call.run()
            out[index] = engine.read(view)[0]
        return out.reshape(count * rows, size)

    def embed(self, token_ids: np.ndarray, image_rows: np.ndarray | None = None) -> np.ndarray:
        """Rows [n, E] of a prompt; `image_rows` replace the embeddings of `image_token_id`, in order."""
        ids = np.asarray(token_ids, np.int64)
        self._check_ids(ids)
        rows = self._table[ids] if self._lookup else self._run_embed(ids)
        if image_rows is not None:
            slots = np.flatnonzero(ids == self.manifest.text.image_token_id)
            if len(slots) != len(image_rows):
                raise PromptError(f"the prompt has {len(slots)} image slots for {len(image_rows)} image rows")
            rows[slots] = image_rows
        return rows

    def encode(self, rows: Sequence[np.ndarray]) -> None:
        """Encoder-decoder models: run `encoder` and `cross_kv` once for the rows [n_b, E] of each sequence."""
        assert self._encoder is not None, "this model has no encoder"
        if self._encoder.run(rows):
            self._forget()

    def reset(self, batch: int = 1) -> None:
        """Start a request: nothing cached."""
        before = (self.arena.batch, self.arena.rows)
        self.arena.reset(batch)
        if before != (self.arena.batch, self.arena.rows):
            self._forget()
        self.exit_count = 0

    def prefill(self, rows: np.ndarray) -> np.ndarray:
        """Run all segments over prompt rows [n, E] of one sequence; logits [1, V] after the last one.

        Widths are rounded up to few sizes; the padding's keys lie beyond the length and are overwritten.
        """
        count, segments = len(rows), len(self._segments)
        if not 1 <= count <= self.max_length:
            raise PromptError(f"the prompt has {count} rows, the session holds 1..{self.max_length}")
        for start in range(0, count, self._widest):
            part = rows[start : start + self._widest]
            used = len(part)
            width = used if used <= 2 else -(-used // PREFILL_STEP) * PREFILL_STEP
            width = min(width, self._widest, self.arena.capacity - start)
            self._reserve(width)
            run = self._prepare(0, segments, width, 0)
            assert run.hidden is not None
            run.hidden[0, :used] = part
            run.hidden[0, used:] = 0
            self._run_chain(run, start, width)
            self.arena.advance(used)
        return self.head(1, first=used - 1)

    # --- one cycle ---

    def begin_cycle(self, width: int) -> None:
        """Reserve `width` rows after every sequence and forget the exit rows. Raises `CapacityError`."""
        if width > self.max_width:
            raise CapacityError(
                f"a cycle of width {width}; the bundle was built with max_width {self.max_width}"
            )
        self._reserve(width)
        self.exit_count = 0

    def trunk(self, cut: int, token: int) -> None:
        """Run segments 0..cut−1 on one token after the rows so far; its hidden row becomes exit row `exit_count`."""
        row = self.exit_count
        start = self.arena.lengths[0] + row
        run = self._passes.get((0, cut, 1, row, 1)) or self._prepare(0, cut, 1, row)
        if self._lookup:
            run.hidden[0, 0] = self._table[token]  # type: ignore[index]
        else:
            self._embed_tokens([[token]])
        self._run_chain(run, start, 1)
        self.exit_count = row + 1

    def draft_logits(self, imitation: str | None, row: int) -> np.ndarray:
        """Logits [V] of exit row `row` through `imitation` (or straight, for early exit) and the head."""
        entry = self._heads.get(("draft", imitation, row))
        if entry is None:
            entry = self._bind_draft(imitation, row)
        call, logits = entry
        call.run()
        return logits if self._direct else self.engine.read(logits)[0]  # type: ignore[return-value, arg-type]

    def tail(self, cut: int, count: int) -> None:
        """Run segments cut.. over the first `count` exit rows, which are a chain. Follow with `head(count)`."""
        assert count == self.exit_count, f"{self.exit_count} exit rows, {count} nodes to verify"
        end = len(self._segments)
        run = self._passes.get((cut, end, count, 0, 1)) or self._prepare(cut, end, count, 0)
        self._run_chain(run, self.arena.lengths[0], count)

    def full(self, *trees: TokenTree) -> None:
        """Run all segments over one tree per sequence, padded to the widest. Follow with `head`.

        The logits of node i of sequence b are row b × width + i, where width is the largest tree's size.
        """
        batch, end = len(trees), len(self._segments)
        assert batch == self.arena.batch, f"{batch} trees for a batch of {self.arena.batch}"
        width = max(len(tree) for tree in trees)
        run = self._passes.get((0, end, width, 0, batch)) or self._prepare(0, end, width, 0)
        tokens = [tree.tokens + [0] * (width - len(tree)) for tree in trees]
        if self._lookup:
            np.take(self._table, tokens, axis=0, out=run.hidden, mode="clip")
        else:
            self._embed_tokens(tokens)
        if batch == 1 and trees[0].is_chain:
            self._run_chain(run, self.arena.lengths[0], width)
            return
        for row, tree in enumerate(trees):
            start = self.arena.lengths[row]
            run.indices[row] = start
            if tree.is_chain:
                self._masks.chain(run.mask, row, start, width)
                depths: Sequence[int] = range(width)
            else:
                self._masks.tree(run.mask, row, start, tree)
                depths = [*tree.depths, *[0] * (width - len(tree))]
            if run.positions is not None:
                run.positions[row] = start + np.asarray(depths)
        self._run(run)

    def head(self, rows: int, first: int = 0) -> np.ndarray:
        """Logits [rows, V] of rows first.. of the last pass, in a buffer that the next `head` overwrites."""
        buffer, width = self._last
        key = (buffer.address, width, rows, first)
        entry = self._heads.get(key)
        batch, size = self.arena.batch, self._info.hidden_size
        if entry is None:
            hidden = self.engine.view(buffer, (batch, width, size))
            logits = self.engine.view(self._logits, (rows, self._vocabulary))
            call = self.engine.bind(
                "head", {"hidden": hidden, "row_index": self._row_index.view((rows,))}, {"logits": logits}
            )
            entry = self._heads[key] = (call, self.engine.read(logits) if self._direct else logits)
        self._row_index.host((rows,))[:] = self._masks.positions[first : first + rows]
        self._row_index.push((rows,))
        call, out = entry
        call.run()
        return out if self._direct else self.engine.read(out)  # type: ignore[return-value, arg-type]

    def last_logits(self) -> np.ndarray:
        """A copy of the first row [V] that the last `head` or `draft_logits` computed."""
        return np.array(self.engine.read(self.engine.view(self._logits, (1, self._vocabulary)))[0])

    def accept(self, tree: TokenTree, path: Sequence[int], row: int = 0) -> None:
        """Make the root and the nodes of `path` valid; everything else is forgotten. Moves rows only for trees."""
        if any(node != index + 1 for index, node in enumerate(path)):
            self._commit(path, row)
        self.arena.advance(1 + len(path), row)
        self.exit_count = 0

    # --- private ---

    def _commit(self, path: Sequence[int], row: int) -> None:
        """Gather the rows of a tree path and write them right after the root, all layers in one call."""
        batch, width = self.arena.batch, len(path)
        inputs, outputs = self.arena.bindings(0, self._info.num_layers)
        shape = (batch, width)
        source, indices = self._source_rows.host(shape), self._indices.host((batch,))
        for other, length in enumerate(self.arena.lengths[:batch]):
            if other == row:
                source[other], indices[other] = length + np.asarray(path), length + 1
            else:  # writes its first rows over themselves
                source[other], indices[other] = np.arange(width), 0
        self._source_rows.push(shape)
        self._indices.push((batch,))
        inputs |= {
            "source_rows": self._source_rows.view(shape),
            "write_indices": self._indices.view((batch,)),
        }
        self.engine.bind("commit", inputs, outputs).run()

    def _reserve(self, width: int) -> None:
        if self.arena.reserve(width):
            self._forget()

    def _forget(self) -> None:
        """Prepared passes belong to one layout of the arena and one encoder length; the engine keeps the calls."""
        self._passes.clear()
        self._heads.clear()

    def _prepare(self, first: int, end: int, width: int, exit_row: int) -> _Pass:
        """Bind segments first..end−1 over [batch, width] rows: from `hidden.0`, or from the exit rows (first > 0);
        into the exit rows at `exit_row` when the run ends before the last segment."""
        engine, info, arena = self.engine, self._info, self.arena
        batch, rows, size = arena.batch, arena.rows, info.hidden_size
        shape, mask_shape = (batch, width, size), (batch, info.mask_heads, width, rows)
        run = _Pass(width)
        run.hidden = self._work[0].host(shape) if first == 0 else None
        run.mask = self._mask.host(mask_shape)
        run.indices = self._indices.host((batch,))
        shared = {"attn_mask": self._mask.view(mask_shape), "write_indices": self._indices.view((batch,))}
        run.pushes = [(self._mask, mask_shape), (self._indices, (batch,))]
        if info.position == "rotary":
            run.positions = self._positions.host((batch, width))
            shared["positions"] = self._positions.view((batch, width))
            run.pushes.append((self._positions, (batch, width)))
        source = engine.view(self._work[0].buffer if first == 0 else self._exit, shape)
        for number in range(first, end):
            to_exit = number == end - 1 and end < len(self._segments)
            if to_exit:
                target = engine.view(self._exit, shape, exit_row * size)
            else:
                target = engine.view(self._work[(number - first + 1) % 2].buffer, shape)
            inputs, outputs = arena.bindings(*info.cuts[number : number + 2])
            inputs |= {"hidden": source, **shared}
            if self._encoder is not None:
                inputs |= self._encoder.bindings(width, *info.cuts[number : number + 2])
            run.calls.append(engine.bind(self._segments[number], inputs, outputs | {"hidden_out": target}))
            source = target
        self._passes[first, end, width, exit_row, batch] = run
        return run

    def _run_chain(self, run: _Pass, start: int, width: int) -> None:
        run.indices[0] = start
        self._masks.chain(run.mask, 0, start, width)
        if run.positions is not None:
            run.positions[0] = self._masks.positions[start : start + width]
        self._run(run)

    def _run(self, run: _Pass) -> None:
        if not self._direct:
            for buffer, shape in run.pushes:
                buffer.push(shape)
            if run.hidden is not None and not self._embedded:
                self._work[0].push(run.hidden.shape)
            self._embedded = False
        for call in run.calls:
            call.run()
        # Only runs that end in the last segment are followed by `head`; their output buffer alternates.
        self._last = (self._work[len(run.calls) % 2].buffer, run.width)

    _embedded = False

    def _embed_tokens(self, tokens: Sequence[Sequence[int]]) -> None:
        """Run `embed` into `hidden.0`."""
        shape = (len(tokens), len(tokens[0]))
        self._tokens.host(shape)[...] = tokens
        self._tokens.push(shape)
        call = self.engine.bind(
            "embed",
            {"token_ids": self._tokens.view(shape), "embedding_table": self._constant},
            {"hidden": self._work[0].view((*shape, self._info.hidden_size))},
        )
        call.run()
        self._embedded = True

    def _run_embed(self, ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), self._info.hidden_size), DTYPES[self._dtype])
        for start in range(0, len(ids), self._widest):
            part = ids[start : start + self._widest]
            self._embed_tokens([part.tolist()])
            view = self._work[0].view((1, len(part), self._info.hidden_size))
            out[start : start + len(part)] = self.engine.read(view)[0]
        self._embedded = False
        return out

    def _bind_draft(self, imitation: str | None, row: int) -> tuple[Call, np.ndarray | View]:
        engine, size = self.engine, self._info.hidden_size
        hidden = engine.view(self._exit, (1, 1, size), row * size)
        calls: list[Call] = []
        if imitation is not None:
            imitated = engine.view(self._imitated, (1, 1, size))
            calls.append(engine.bind(imitation, {"hidden": hidden}, {"hidden_out": imitated}))
            hidden = imitated
        # A row index of its own keeps 0 in place: nothing to write per drafted token.
        if not hasattr(self, "_row_zero"):
            self._row_zero = HostBuffer(engine, "row_zero", 1, "int64")
            self._row_zero.push((1,))
        logits = engine.view(self._logits, (1, self._vocabulary))
        calls.append(
            engine.bind(
                "head", {"hidden": hidden, "row_index": self._row_zero.view((1,))}, {"logits": logits}
            )
        )
        call = calls[0] if len(calls) == 1 else _Both(*calls)
        entry = self._heads["draft", imitation, row] = (
            call,
            engine.read(logits)[0] if self._direct else logits,
        )
        return entry

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self._table):
            bad = int(ids[(ids < 0) | (ids >= len(self._table))][0])
            raise PromptError(f"token id {bad} is outside the vocabulary of {len(self._table)}")


class _Both:
    """Two calls in order."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Call, second: Call):
        self._first, self._second = first, second

    def run(self) -> None:
        self._first.run()
        self._second.run()
