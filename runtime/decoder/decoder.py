"""Passes of the decoder over one sequence or a batch: prefill, trunk, tail, full, head.

Buffers have fixed addresses, and a pass of a given shape is prepared once (calls bound, host arrays sliced), so
a step writes rows, masks and indices, and runs. Rows beyond the arena's length are scratch: `begin_cycle`
reserves them, passes write them, `accept` makes a path of them valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..bundle.interfaces import positions_shape
from ..bundle.manifest import Manifest
from ..common.errors import CapacityError, OptionError, PromptError
from ..engines.base import DTYPES, Buffer, Call, Engine, View
from ..engines.buffers import HostBuffer
from .device_cycle import OnDevice, is_supported
from .embedding import Embedding
from .encoder import Encoder
from .fast_path import ChainStep, chain_step, embedding_writer
from .kv_cache import BATCH_BUCKET, BUCKET, KVArena
from .logits import TargetLogits
from .masks import CausalMask
from .positions import next_position
from .token_tree import TokenTree
from .vision import Vision

PREFILL_WIDTH = 256
"""Prompt rows per pass: bounds masks and activations; longer prompts take several passes."""

PREFILL_STEP = 16
"""Prefill widths are multiples of this, so that few shapes are bound."""

WIDEST = 8
"""Bytes of the widest value that a head offers per row."""

OnRows = Callable[[int, View], None]
"""`on_rows(first slot, rows [1, n, E])`: rows before the final norm of one chunk of a prompt."""


def _tapped(manifest: Manifest) -> set[int]:
    """Layers after which a pass leaves its rows: `taps`, and those of drafts that attend over such rows."""
    taps = {layer for draft in manifest.drafts for layer in draft.taps or ()}
    return taps | {
        draft.layer for draft in manifest.drafts if draft.name in manifest.attending and draft.layer
    }


class ForwardPass:
    """A prepared run of segments over [batch, width] rows. Host arrays are None where not needed."""

    __slots__ = (
        "batch",
        "batch_index",
        "calls",
        "embedded",
        "heads",
        "hidden",
        "indices",
        "mask",
        "positions",
        "pushes",
        "result",
        "shape",
        "sources",
        "step",
        "width",
    )

    def __init__(self, batch: int, width: int, batch_index: int):
        self.batch, self.width, self.batch_index = batch, width, batch_index
        self.sources = -1
        """The encoder's `version` for which the cross-attention mask was written."""
        self.calls: list[Call] = []
        self.heads: dict[int, TargetLogits] = {}
        """The head over the first rows of the result, by their number."""
        self.pushes: list[tuple[HostBuffer, tuple[int, ...]]] = []
        self.hidden: np.ndarray | None = None
        self.embedded: np.ndarray
        """`hidden` as [batch × width, E], where there is one."""
        self.mask: np.ndarray
        self.indices: np.ndarray
        self.positions: np.ndarray | None = None
        """[batch, axes, width]"""
        self.step: ChainStep | None = None
        """The pass over a chain of one sequence where that has a short way."""
        self.result: View


class Decoder:
    """One model on one engine, for up to `max_batch` sequences of `max_length` positions decoded together.

    `tensor` reads a bundle's tensor by name (memory-mapped). Sequences hold places 0..batch − 1; every pass but prefill
    runs over all of them.
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
        self.verify_width = manifest.verify_width
        """Rows of every pass but prefill, where kernels give other bits at other widths; None: as many as are verified."""
        self.widest_tree = manifest.widest_tree
        info = self._info = manifest.decoder
        # A frozen cache is as long as the bundle's limits, however short the session's requests are.
        longest = manifest.limits.max_length if engine.static_cache else self.max_length
        capacity = longest + self.max_width
        cache = engine.dtype("segment.0", "key_cache.0")
        self.arena = KVArena(
            engine, info.num_layers, info.num_kv_heads, info.head_dim, cache, capacity, max_batch,
            bucket=BUCKET if max_batch == 1 else BATCH_BUCKET,
            # The bound length is a part of a kernel's shape, and when it grows depends on what is drafted.
            static=engine.static_cache or self.verify_width is not None,
            beside=[(cache.num_kv_heads, cache.head_dim) for cache in manifest.attending.values()],
        )  # fmt: skip
        if engine.static_cache and self.arena.capacity != capacity:
            raise OptionError(
                f"max_batch: of {max_batch} sequences with {capacity} cache rows not each begins at an address that engine "
                f"{engine.name} can bind; load with max_batch=1, or build the bundle with a --max-length that makes "
                f"{self.arena.aligned(capacity)} rows"
            )
        capacity = self.arena.capacity
        self._shift = [0] * max_batch
        """Position less slot of each sequence's next row: not 0 after images with M-RoPE."""
        self._segments = manifest.segments
        self._end = len(self._segments)
        prefill = self.max_width if info.cross_attention else min(PREFILL_WIDTH, capacity)
        self._widest = max(prefill, self.max_width)
        rows = max(self._widest, max_batch * self.max_width)
        self._size = info.hidden_size
        self.dtype = engine.dtype("head", "hidden")
        """Of rows between graphs, as this engine binds them."""
        self._work = [
            HostBuffer(engine, f"hidden.{index}", rows * self._size, self.dtype) for index in range(2)
        ]
        # The trunk's rows of a cycle, step after step: [max_width, batch, E], each step at an aligned address.
        item = DTYPES[self.dtype].itemsize
        self._align = lambda elements: -(-elements * item // engine.alignment) * engine.alignment // item
        step = self._align(max_batch * self._size)
        self._exits = {
            cut: engine.allocate(f"exit_rows.{cut}", self.max_width * step * item)
            for cut in range(1, self._end)
        }
        # Rows of a pass after the cuts that a draft reads: [batch, width, E].
        self._taps = {
            info.cuts.index(layer): engine.allocate(f"tap.{layer}", rows * self._size * item, zeroed=True)
            for layer in sorted(_tapped(manifest))
        }
        self._due: tuple[int, int] | None = None
        """(cut, count) of a tail whose exit rows are not among the taps yet."""
        self.pass_number = 0
        """Of the last pass over all segments, or over those behind exit rows."""
        masks = info.mask_heads * capacity * rows
        self._mask = HostBuffer(engine, "attn_mask", masks, engine.dtype("segment.0", "attn_mask"))
        self._axes = 3 if info.position == "mrope" else 1
        self._positions = HostBuffer(engine, "positions", self._axes * rows, "int64")
        self._indices = HostBuffer(engine, "write_indices", max_batch, "int64")
        self._row_index = HostBuffer(engine, "row_index", rows, "int64")
        self._in_order = HostBuffer(engine, "row_index.in_order", rows, "int64")
        self._in_order.host((rows,))[:] = range(rows)
        self._in_order.push((rows,))
        self._source_slots = HostBuffer(engine, "source_rows", max_batch * self.max_width, "int64")
        self._vocabulary = manifest.text.vocab_size
        self._bias = None if info.relative_bias is None else np.asarray(tensor(info.relative_bias.tensor))
        self.masks = CausalMask(
            capacity,
            info.mask_heads,
            DTYPES[engine.dtype("segment.0", "attn_mask")],
            self._bias,
            info.relative_bias.max_distance if info.relative_bias else 128,
        )
        self._numbers = self._limited(np.arange(capacity, dtype=np.int64))
        """Positions of a chain, to slice from."""
        self._encoder = Encoder(engine, manifest, tensor, max_batch) if info.cross_attention else None
        self._vision = Vision(engine)
        self.embedding = Embedding(
            engine, tensor("embedding_table"), self._work[0], rows, min(rows, PREFILL_WIDTH, capacity)
        )
        self._passes: dict[tuple[object, ...], ForwardPass] = {}
        self._heads: dict[tuple[object, ...], TargetLogits] = {}
        self._commits: dict[tuple[int, int], Call] = {}
        """What moves [batch, width] rows of all layers."""
        self._head_buffers: dict[str, Buffer] = {}
        self._bound: object = None
        self._direct = engine.host_memory
        self._last: ForwardPass
        self._moved = True
        self.exit_count = 0
        """Steps of the trunk saved in this cycle: the pending tokens and the drafts that followed them."""
        self._passed: list[list[int]] = []
        """With a `verify_width`: what passed the trunk in this cycle, by sequence."""
        self.on_device = OnDevice(self) if is_supported(engine) else None
        """Whole cycles of a single sequence without the host, where the engine offers them."""

    # --- the sequences ---

    @property
    def batch(self) -> int:
        """Sequences decoded together now."""
        return self.arena.batch

    def reset(self, batch: int = 1) -> None:
        """Start with `batch` sequences that have nothing cached."""
        self.arena.reset(batch)
        self._shift[:] = [0] * len(self._shift)
        if self._encoder is not None:
            self._encoder.reset(batch)
        self.exit_count = 0
        self._moved = True

    @property
    def can_resume(self) -> bool:
        """Whether a later request can go on behind rows of this one: not where the decoder looks at an encoder's."""
        return self._encoder is None

    def resume(self, length: int) -> int:
        """Go on with the one sequence that is cached, cut to its first `length` rows; returns its place."""
        assert self.can_resume and self.arena.batch == 1 and length <= self.arena.lengths[0]
        self.arena.lengths[0] = length
        self._shift[0] = 0
        self.exit_count = 0
        return 0

    def clear(self, batch_index: int) -> None:
        """Zero what is cached of sequence `row`, of which numbers are not finite: who has its place next, or grows into
        it, reads none of them."""
        self.arena.clear(batch_index)
        if self._encoder is not None:
            self._encoder.arena.clear(batch_index)

    def add(self) -> int:
        """A further sequence; returns its place."""
        row = self.arena.add()
        self._shift[row] = 0
        if self._encoder is not None:
            self._encoder.add()
        return row

    def remove(self, batch_index: int) -> None:
        """Forget sequence `row`; the last one takes its place."""
        self._shift[batch_index] = self._shift[self.arena.batch - 1]
        self.arena.remove(batch_index)
        if self._encoder is not None:
            self._encoder.remove(batch_index)

    # --- one request: image rows, encoder, prefill ---

    def image_embeds(self, inputs: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Run `vision` on each mapping of inputs; rows [n, E] in order."""
        return self._vision.run(inputs)

    def embed(
        self,
        token_ids: np.ndarray,
        image_embeds: np.ndarray | None = None,
        image_positions: np.ndarray | None = None,
    ) -> np.ndarray:
        """Rows [n, E] of a prompt; `image_rows`, in order, replace the embeddings at `slots` (by default: where the ids
        are `text.image_token_id`)."""
        ids = np.asarray(token_ids, np.int64)
        if image_embeds is None:
            return self.embedding.embeddings(ids)
        if image_positions is None:
            image_positions = np.flatnonzero(ids == self.manifest.text.image_token_id)
        if len(image_positions) != len(image_embeds):
            raise PromptError(
                f"the prompt has {len(image_positions)} image slots for {len(image_embeds)} image rows"
            )
        if len(image_positions) == len(ids):  # nothing but image rows: their placeholders need no embedding
            rows = np.empty((len(ids), self._size), DTYPES[self.dtype])
        else:
            rows = self.embedding.embeddings(ids)
        rows[image_positions] = image_embeds
        return rows

    def encode(self, batch_index: int, encoder_hidden: np.ndarray) -> None:
        """Models with cross-attention: what sequence `row` looks at, rows [n, E]."""
        assert self._encoder is not None, "this model has no cross-attention"
        self._encoder.run(batch_index, encoder_hidden)
        self._moved = True

    def prefill(
        self,
        hidden_states: np.ndarray,
        batch_index: int = 0,
        positions: np.ndarray | None = None,
        on_hidden_states: OnRows | None = None,
    ) -> TargetLogits:
        """Run all segments over prompt rows [n, E] of sequence `row`, behind those that it has (`resume`); what the target
        says after the last one.

        `positions` int64 [axes, all rows] by default count from 0; later positions go on after the highest. Widths are
        rounded up to few sizes; the padding's keys lie beyond the length and are overwritten.
        """
        before, segments = self.arena.lengths[batch_index], self._end
        count = before + len(hidden_states)
        if not (len(hidden_states) and count <= self.max_length):
            raise PromptError(f"the prompt has {count} rows, the session holds 1..{self.max_length}")
        used = 0
        for start in range(before, count, self._widest):
            part = hidden_states[start - before : start - before + self._widest]
            used = len(part)
            width = used if used <= 2 else -(-used // PREFILL_STEP) * PREFILL_STEP
            width = min(width, self._widest, self.arena.capacity - start)
            if self.arena.reserve(width, batch_index) or self._moved:
                self._forget_moved()
            run = self.prepared(0, segments, width, 0, batch_index, 1)
            assert run.hidden is not None
            run.hidden[0, :used] = part
            run.hidden[0, used:] = 0
            given = None
            if positions is not None:
                given = np.pad(positions[:, start : start + used], ((0, 0), (0, width - used)), mode="edge")
            run.indices[0] = start
            self.masks.chain(run.mask, 0, start, width)
            if run.positions is not None:
                run.positions[0] = self._limited(start + np.arange(width)) if given is None else given
            self._run(run)
            self.arena.advance(used, batch_index)
            if on_hidden_states is not None:
                on_hidden_states(start, run.result.buffer.view((1, used, self._size), self.dtype))
        if positions is not None:
            self._shift[batch_index] = next_position(positions) - count
        return self.head(1, first=used - 1)

    # --- one cycle ---

    def begin_cycle(self, width: int) -> None:
        """Reserve `width` rows after every sequence and forget the exit rows. Raises `CapacityError`."""
        if width > self.widest_tree:
            limit = "max_width" if self.verify_width is None else "verify_width"
            raise CapacityError(
                f"a cycle of width {width}; the bundle was built with {limit} {self.widest_tree}"
            )
        if self.arena.reserve(self.padded(width)) or self._moved:
            self._forget_moved()
        self.exit_count = 0
        self._passed = [[] for _ in range(self.arena.batch)]

    def padded(self, width: int) -> int:
        """Rows per sequence of a pass over `width` nodes."""
        return self.verify_width or width

    def trunk(self, cut: int, tokens: Sequence[int], trees: Sequence[TokenTree] | None = None) -> None:
        """Run segments 0..cut−1 over the next token of every sequence; their rows after every segment become exit rows
        of step `exit_count`. Each token follows the one of the step before, or, with `trees`, is the node of that
        number of its sequence's tree (a chain beyond the tree's end)."""
        step, width, batch = self.exit_count, self.padded(1), self.arena.batch
        run = self._passes.get((0, cut, width, step, 0, batch)) or self.prepared(0, cut, width, step)
        self.exit_count = step + 1
        if self.verify_width is None:
            self._pass(run, tokens, trees, step)
            return
        # Nodes that have passed pass again, each in its own row and slot: a pass of this width has room for no others.
        rows: list[int] = []
        for own, token in zip(self._passed, tokens, strict=True):
            own.append(token)
            rows += [*own, *own[-1:] * (width - len(own))]
        self._pass(run, rows, trees)

    def exit_hidden(self, cut: int, step: int) -> View:
        """Rows [batch, 1, E] after segment `cut` − 1 that the trunk saved at `step` of this cycle."""
        batch = self.arena.batch
        shape = (batch, 1, self._size)
        return self._exits[cut].view(shape, self.dtype, step * self._align(batch * self._size))

    def tail(self, cut: int, count: int, trees: Sequence[TokenTree] | None = None) -> None:
        """Run segments cut.. over the first `count` exit rows of every sequence, chains where no `trees` are given.

        Follow with `head`; the rows are as after `full`.
        """
        assert count == self.exit_count, f"{self.exit_count} exit rows, {count} nodes to verify"
        end, batch, width = self._end, self.arena.batch, self.padded(count)
        run = self._passes.get((cut, end, width, 0, 0, batch)) or self.prepared(cut, end, width, 0)
        if run.hidden is not None:
            self._gather_exits(run, cut, count)
        self._pass(run, None, trees)
        self._due = cut, count

    def full(self, *trees: TokenTree) -> None:
        """Run all segments over one tree per sequence, padded to the widest, or to `verify_width`. Follow with `head`.

        The logits of node i of sequence b are row b × width + i, where width is the largest tree's size, or `verify_width`.
        """
        batch, end, tokens = self.arena.batch, self._end, trees[0].tokens
        assert len(trees) == batch, f"{len(trees)} trees for a batch of {batch}"
        width = self.padded(len(tokens))
        if batch > 1 or width > len(tokens):
            width = self.padded(max(map(len, trees)))
            # Scratch rows repeat a token of their own sequence: its numbers are as finite as the sequence is.
            tokens = [
                token for tree in trees for token in (*tree.tokens, *tree.tokens[-1:] * (width - len(tree)))
            ]
        run = self._passes.get((0, end, width, 0, 0, batch)) or self.prepared(0, end, width, 0)
        self._pass(run, tokens, trees)

    def head(self, num_logits: int, first: int = 0) -> TargetLogits:
        """What the target says after rows first.. of the last pass; valid until the next `head`."""
        if first == 0:
            return (self._last.heads.get(num_logits) or self._head_over_first(num_logits)).run()
        return self._head_over(range(first, first + num_logits)).run()

    def head_of(self, trees: Sequence[TokenTree]) -> TargetLogits:
        """What the target says after the nodes of `trees`, one tree after the other, after `full` or `tail`."""
        width, rows = self._last.width, 0
        for tree in trees:
            rows += len(tree.tokens)
        most = len(trees) * width
        if rows == most or (self.verify_width is not None and len(trees) == 1):
            return (self._last.heads.get(most) or self._head_over_first(most)).run()
        places: list[int] = []
        for number, tree in enumerate(trees):
            places += range(number * width, number * width + len(tree))
        if self.verify_width is not None:
            places += places[-1:] * (most - rows)
        return self._head_over(places).run()

    def _head_over_first(self, num_logits: int) -> TargetLogits:
        """The head over the first `rows` rows of the last pass; nothing is written for it."""
        head = self._last.heads[num_logits] = self._bound_head(self._in_order.view((num_logits,)))
        return head

    def _head_over(self, row_index: Sequence[int]) -> TargetLogits:
        """The head over some rows of the last pass, which the row index names."""
        shape = (len(row_index),)
        self._row_index.host(shape)[:] = row_index
        self._row_index.push(shape)
        return self._bound_head(self._row_index.view(shape))

    def _bound_head(self, index: View) -> TargetLogits:
        """The head over the result of the last pass; passes with the same result share it."""
        result = self._last.result
        key = (result.address, result.shape, index.address, index.shape)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self.bind_head(result, index, index.size)
        return head

    def bind_head(
        self, hidden: View, index: View, num_logits: int, purpose: str = "", graph: str = "head"
    ) -> TargetLogits:
        """`head` over rows of `hidden` [batch, width, E] that `index` int64 [rows] names; heads of one `purpose`
        share their outputs. `graph` made the rows: it is named where they are not finite."""
        outputs = self._head_outputs(purpose, num_logits)
        call = self.engine.bind("head", {"hidden": hidden, "row_index": index}, outputs)
        return TargetLogits(self.engine, call, outputs, graph)

    def accept(self, tree: TokenTree, path: Sequence[int], batch_index: int = 0) -> None:
        """Make the root and the nodes of `path` of sequence `row` valid; everything else of it is forgotten."""
        if any(node != index + 1 for index, node in enumerate(path)):
            start, width = self.arena.lengths[batch_index], len(path)
            moves = [
                (np.arange(width), 0)
            ] * self.arena.batch  # the others write rows they hold over themselves
            moves[batch_index] = (start + np.asarray(path), start + 1)
            self._commit(moves, width)
        self.arena.advance(1 + len(path), batch_index)
        self.exit_count = 0

    def accept_all(self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]]) -> None:
        """`accept` for every sequence after one pass over all; rows are moved by one call, and only for trees."""
        for tree in trees:
            if not tree.is_chain:
                self._move(paths)
                break
        for row, path in enumerate(paths):
            self.arena.advance(1 + len(path), row)
        self.exit_count = 0

    def last_logits(self) -> np.ndarray:
        """A copy of the first row [V] that the last `head` computed."""
        view = self._head_buffers["logits"].view((1, self._vocabulary), "float32")
        return np.array(self.engine.read(view)[0])

    def verified_hidden(self, batch_index: int, nodes: int) -> View:
        """Rows [1, nodes, E] before the final norm of the first nodes of sequence `row`, after `full` or `tail`: where
        they lie until the next pass."""
        result, size = self._last.result, self._size
        return result.buffer.view(
            (1, nodes, size), self.dtype, result.offset + batch_index * self._last.width * size
        )

    # --- private ---

    def _head_outputs(self, purpose: str, num_logits: int) -> dict[str, View]:
        """Outputs of heads over `rows` rows: logits, and what else the engine's head offers (one value per row), one
        behind the other in one buffer."""
        most = self.arena.max_batch * (1 if purpose else self.max_width)
        unit = max(self.engine.alignment, WIDEST)

        def step(count: int) -> int:
            return -(-count * WIDEST // unit) * unit

        logits = self._head_buffer(f"{purpose}logits", most * self._vocabulary * DTYPES["float32"].itemsize)
        outputs = {"logits": logits.view((num_logits, self._vocabulary), "float32")}
        others = [value for value in self.engine.interface("head").outputs if value.name != "logits"]
        if others:
            buffer = self._head_buffer(f"{purpose}answers", step(most) * len(others))
            for place, value in enumerate(others):
                offset = place * step(num_logits) // DTYPES[value.dtype].itemsize
                outputs[value.name] = buffer.view((num_logits,), value.dtype, offset)
        return outputs

    def _head_buffer(self, name: str, nbytes: int) -> Buffer:
        if name not in self._head_buffers:
            self._head_buffers[name] = self.engine.allocate(name, nbytes)
        return self._head_buffers[name]

    def _move(self, paths: Sequence[Sequence[int]]) -> None:
        """Bring the rows of every path right behind its root, all sequences in one call, if any lie elsewhere."""
        moved = [any(node != at + 1 for at, node in enumerate(path)) for path in paths]
        if not any(moved):
            return
        width = max(map(len, paths))
        moves = []
        for path, length, moves_rows in zip(paths, self.arena.lengths, moved, strict=False):
            # Slots that the pass has just written, over themselves, wherever nothing moves.
            slots = length + (1 if moves_rows else 0) + np.arange(width)
            if moves_rows:
                slots[: len(path)] = length + np.asarray(path)
            moves.append((slots, length + (1 if moves_rows else 0)))
        self._commit(moves, width)

    def _commit(self, moves: Sequence[tuple[np.ndarray, int]], width: int) -> None:
        """Gather `width` rows of every sequence and write them contiguously, all layers in one call."""
        batch = len(moves)
        shape = (batch, width)
        source, indices = self._source_slots.host(shape), self._indices.host((batch,))
        for row, (slots, start) in enumerate(moves):
            source[row], indices[row] = slots, start
        self._source_slots.push(shape)
        self._indices.push((batch,))
        if shape not in self._commits:
            inputs, outputs = self.arena.bindings(0, self._info.num_layers)
            inputs["source_rows"] = self._source_slots.view(shape)
            inputs["write_indices"] = self._indices.view((batch,))
            self._commits[shape] = self.engine.bind("commit", inputs, outputs)
        self._commits[shape].run()

    def _forget_moved(self) -> None:
        """Forget prepared passes unless they are bound to what the arenas hold where they hold it now."""
        self._moved = False
        if self.layout != self._bound:
            self._bound = self.layout
            self._passes.clear()
            self._heads.clear()
            self._commits.clear()

    def prepared(
        self, first: int, end: int, width: int, step: int, batch_index: int = 0, batch: int | None = None
    ) -> ForwardPass:
        """Bind segments first..end−1 over [batch, width] rows of sequences row..: from `hidden.0`, or from the exit
        rows where they lie as the tail needs them; into the exit rows of `step` when the run ends before the last
        segment."""
        engine, info, arena = self.engine, self._info, self.arena
        count = arena.batch if batch is None else batch
        key = (first, end, width, step, batch_index, count)
        if key in self._passes:
            return self._passes[key]
        shape = (count, width, self._size)
        run, shared = self._new_pass(count, width, batch_index)
        padded = self.verify_width is not None and batch is None
        in_place = first > 0 and not padded and (width == 1 or self._align(count * self._size) == self._size)
        source = self._exits[first].view(shape, self.dtype) if in_place else self._enters(run)
        trunk = end < self._end
        for number in range(first, end):
            if trunk and not padded:
                target = self._exits[number + 1].view(
                    shape, self.dtype, step * self._align(count * self._size)
                )
            elif number + 1 in self._taps:
                target = self._taps[number + 1].view(shape, self.dtype)
            else:
                target = self._work[(number - first + 1) % 2].view(shape)
            layers = (info.cuts[number], info.cuts[number + 1])
            inputs, outputs = arena.bindings(*layers, batch_index, count)
            inputs |= {"hidden": source, **shared}
            place = self._positions_for(info.cuts[number], run)
            if place is not None:
                inputs["positions"] = place
            if self._encoder is not None:
                inputs |= self._encoder.bindings(width, *layers, batch_index, count)
            run.calls.append(engine.bind(self._segments[number], inputs, outputs | {"hidden_out": target}))
            source = target
            if trunk and padded:
                run.calls += self._node_copies(number + 1, step, target)
        return self._keep(key, run, source)

    def _new_pass(self, count: int, width: int, batch_index: int) -> tuple[ForwardPass, dict[str, View]]:
        """A pass without calls, and what all of its graphs are told of where its rows stand."""
        mask_shape = (count, self._info.mask_heads, width, self.arena.rows)
        run = ForwardPass(count, width, batch_index)
        run.mask = self._mask.host(mask_shape)
        run.indices = self._indices.host((count,))
        run.pushes = [(self._mask, mask_shape), (self._indices, (count,))]
        return run, {
            "attn_mask": self._mask.view(mask_shape),
            "write_indices": self._indices.view((count,)),
        }

    def _enters(self, run: ForwardPass) -> View:
        """Where the rows of tokens enter a pass."""
        shape = (run.batch, run.width, self._size)
        run.hidden = self._work[0].host(shape)
        run.embedded = run.hidden.reshape(run.batch * run.width, self._size)
        return self._work[0].view(shape)

    def _keep(self, key: tuple[object, ...], run: ForwardPass, result: View) -> ForwardPass:
        """A pass that is whole, to be found again by `key`."""
        run.result = result
        if (
            self._direct
            and run.batch_index == 0
            and run.batch == self.arena.batch == 1
            and self.embedding.lookup
        ):
            run.step = self._chain_step(run)
        self._passes[key] = run
        return run

    def bind_partial(self, graph: str, attention: Sequence[int]) -> ForwardPass:
        """Bind `graph`, a decoder that has the attention of these layers only, over one row of every sequence: from
        `hidden.0` to `hidden.1`, beside the rows that `prepared` passes leave. It reads and writes their keys and values."""
        batch = self.arena.batch
        key = (graph, batch)
        if key in self._passes:
            return self._passes[key]
        run, inputs = self._new_pass(batch, 1, 0)
        inputs["hidden"], result = self._enters(run), self._work[1].view((batch, 1, self._size))
        outputs = {"hidden_out": result}
        for layer in attention:
            caches, updated = self.arena.bindings(layer, layer + 1, 0, batch)
            inputs |= caches
            outputs |= updated
            if self._encoder is not None:
                inputs |= self._encoder.bindings(1, layer, layer + 1, 0, batch)
        place = self._positions_for(0, run)
        if place is not None:
            inputs["positions"] = place
        run.calls.append(self.engine.bind(graph, inputs, outputs))
        return self._keep(key, run, result)

    def run_partial(self, run: ForwardPass, tokens: Sequence[int], step: int) -> None:
        """Run a pass of `apart` over the next token of every sequence, `step` rows behind what is valid of it. What it
        writes is scratch: a pass over all segments must follow that writes these rows of every layer anew."""
        self._pass(run, tokens, None, step)

    def _chain_step(self, run: ForwardPass) -> ChainStep:
        """What `_embed_tokens`, `_place` and `_run` do for a chain of one sequence."""
        fill = positions = None
        if run.hidden is not None:
            fill = embedding_writer(run.embedded, self.embedding)
        if run.positions is not None:
            places, width = run.positions, run.width
            positions = lambda start: self._place_chain(places, 0, start, width)  # noqa: E731
        return chain_step(run, self.masks, self._encoder, fill, positions)

    def _positions_for(self, first_layer: int, run: ForwardPass) -> View | None:
        """The view of `positions` that a segment takes, whose host side the pass then fills; None if it takes none."""
        wanted = positions_shape(self._info.position, first_layer)
        if wanted is None:
            return None
        shape = (run.batch, run.width) if len(wanted) == 2 else (self._axes, run.batch, run.width)
        if run.positions is None:
            host = self._positions.host(shape)
            run.positions = host[:, None] if len(wanted) == 2 else host.transpose(1, 0, 2)
            run.pushes.append((self._positions, shape))
        return self._positions.view(shape)

    def _limited(self, positions: np.ndarray) -> np.ndarray:
        """Positions of padding and scratch rows may lie beyond a table of learned ones: its last entry will do."""
        most = self._info.max_positions
        return positions if most is None else np.minimum(positions, most - 1)

    def _write_positions(
        self, run: ForwardPass, trees: Sequence[TokenTree] | None, step: int | None = None
    ) -> None:
        """Write indices, masks and positions of a pass over whole trees, or over their nodes of number `step`. Without
        `trees`, and beyond a tree's end, every token follows the one before."""
        lengths, ahead = self.arena.lengths, step or 0
        for row in range(run.batch):
            start = lengths[row] + ahead
            run.indices[row] = start
            if trees is None or (tree := trees[row]).is_chain or ahead >= len(tree.tokens):
                self.masks.chain(run.mask, row, start, run.width)
                if run.positions is not None:
                    self._place_chain(run.positions, row, start, run.width)
            elif step is None:
                self.masks.tree(run.mask, row, start, tree)
                self._place_nodes(run, row, tree.depths)
            else:
                self.masks.node(run.mask, row, lengths[row], tree, step)
                self._place_nodes(run, row, tree.depths[step : step + 1])

    def _place_chain(self, positions: np.ndarray, batch_index: int, start: int, width: int) -> None:
        """Positions of `width` rows from slot `start` on of sequence `row`."""
        shift = self._shift[batch_index]
        if shift:
            positions[batch_index] = self._limited(self.masks.positions[:width] + (start + shift))
        else:
            positions[batch_index] = self._numbers[start : start + width]

    def _place_nodes(self, run: ForwardPass, batch_index: int, depths: Sequence[int]) -> None:
        """Positions of nodes of a tree in sequence `row`, padding like the root."""
        if run.positions is not None:
            padded = np.zeros(run.width, np.int64)
            padded[: len(depths)] = depths
            run.positions[batch_index] = self._limited(
                self.arena.lengths[batch_index] + self._shift[batch_index] + padded
            )

    def _pass(
        self,
        run: ForwardPass,
        tokens: Sequence[int] | None,
        trees: Sequence[TokenTree] | None,
        step: int | None = None,
    ) -> None:
        """Run over `tokens` [batch × width], or over the rows that lie there; `trees` and `step` as `_place` reads
        them."""
        if run.step is not None and (trees is None or trees[0].is_chain):
            run.step(tokens, self.arena.lengths[0] + (step or 0))
            self.set_last_pass(run)
            return
        if tokens is not None:
            self._embed_tokens(run, tokens)
        self._write_positions(run, trees, step)
        self._run(run)

    def _run(self, run: ForwardPass) -> None:
        self.refresh(run)
        if not self._direct:
            for buffer, shape in run.pushes:
                buffer.push(shape)
            if run.hidden is not None and not self._embedded:
                self._work[0].push(run.hidden.shape)
            self._embedded = False
        for call in run.calls:
            call.run()
        self.set_last_pass(run)

    _embedded = False
    """The rows of the next pass are on the engine's side already."""

    def _embed_tokens(self, run: ForwardPass, tokens: Sequence[int]) -> None:
        """Rows of `tokens` [batch × width]."""
        if self.embedding.lookup:
            self.embedding.fill(run.embedded, tokens)
        else:
            self.embedding.run(tokens, (run.batch, run.width))
            self._embedded = True

    def _gather_exits(self, run: ForwardPass, cut: int, count: int) -> None:
        """Exit rows, step after step, into [batch, width, E]; rows beyond `count` repeat the last one."""
        assert run.hidden is not None
        batch, size = run.batch, self._size
        stride = self._align(batch * size)
        if self._direct:
            whole = self.engine.read(self._exits[cut].view((count, stride), self.dtype))
            run.hidden[:, :count] = whole[:, : batch * size].reshape(count, batch, size).transpose(1, 0, 2)
            run.hidden[:, count:] = run.hidden[:, count - 1 : count]
            return
        for copy in self.exit_copies(run, cut, count):
            copy.run()
        self._embedded = True

    # --- for cycles that stay on the device ---

    @property
    def segments(self) -> int:
        """How many there are."""
        return self._end

    @property
    def layout(self) -> object:
        """Where caches lie: passes are prepared anew when it changes."""
        return self.arena.rows, None if self._encoder is None else self._encoder.cache_len

    def position_inputs(self, run: ForwardPass) -> tuple[View, View | None, View]:
        """Where a pass reads its mask, its positions (None: it takes none) and the slots of its first rows."""
        mask = self._mask.view((run.batch, self._info.mask_heads, run.width, self.arena.rows))
        positions = None
        if run.positions is not None:
            axes = (self._axes,) if self._axes > 1 else ()
            positions = self._positions.view((*axes, run.batch, run.width))
        return mask, positions, self._indices.view((run.batch,))

    def exit_copies(self, run: ForwardPass, cut: int, count: int) -> list[Call]:
        """What brings the first `count` exit rows of every sequence to where the tail `run` reads them, rows beyond them
        repeating the last one; nothing where it reads them in place."""
        if run.hidden is None:
            return []
        return self._exit_copies(self._work[0].buffer, cut, run.batch, run.width, count)

    def _exit_copies(self, target: Buffer, cut: int, batch: int, width: int, count: int) -> list[Call]:
        """What brings the first `count` exit rows of every sequence, step after step, to `target` [batch, width, E]; rows
        beyond them repeat the last one."""
        size, stride = self._size, self._align(batch * self._size)
        return [
            self.engine.copy(
                target.view((1, 1, size), self.dtype, (row * width + place) * size),
                self._exits[cut].view((1, 1, size), self.dtype, min(place, count - 1) * stride + row * size),
            )
            for row in range(batch)
            for place in range(width)
        ]

    def _node_copies(self, cut: int, step: int, hidden_states: View) -> list[Call]:
        """What makes exit rows of `step` of the rows of that number in `rows` [batch, width, E], which left segment
        `cut` − 1."""
        (batch, width, size), stride = hidden_states.shape, self._align(hidden_states.shape[0] * self._size)
        return [
            self.engine.copy(
                self._exits[cut].view((1, 1, size), self.dtype, step * stride + row * size),
                hidden_states.buffer.view(
                    (1, 1, size), self.dtype, hidden_states.offset + (row * width + step) * size
                ),
            )
            for row in range(batch)
        ]

    def hidden_after(self, layer: int) -> View:
        """Rows [batch, width, E] of the last pass after `layer` layers, one of the drafts' `taps` or the layer of one that
        attends."""
        if self._due is not None:
            (cut, count), self._due = self._due, None
            batch, width = self._last.batch, self._last.width
            for tap in self._taps:
                if tap <= cut:
                    # Rows that the trunk left at that cut, to where a pass over all segments would leave them.
                    for copy in self._exit_copies(self._taps[tap], tap, batch, width, count):
                        copy.run()
        return self._taps[self._info.cuts.index(layer)].view(self._last.result.shape, self.dtype)

    @property
    def last_batch_index(self) -> int:
        """The first sequence of the last pass."""
        return self._last.batch_index

    def draft_layer_index(self, draft: str) -> int:
        """The layer of the arena where a draft that attends keeps its keys and values."""
        return self._info.num_layers + list(self.manifest.attending).index(draft)

    def offset_of(self, hidden_states: View) -> int:
        """Where rows of the last pass begin among all of it, in elements."""
        return hidden_states.offset - self._last.result.offset

    def row_range(self, count: int) -> View:
        """int64 [count]: 0, 1, …"""
        return self._in_order.view((count,))

    def position_of(self, slot: int, batch_index: int = 0) -> int:
        """Position of the row in `slot` of a sequence whose prompt lies before it."""
        return slot + self._shift[batch_index]

    def refresh(self, run: ForwardPass) -> None:
        """Show a pass what cross-attention may see now."""
        if self._encoder is not None and run.sources != self._encoder.version:
            run.sources = self._encoder.write_mask(run.width, run.batch_index, run.batch)

    def set_last_pass(self, run: ForwardPass) -> None:
        """`run` was the last pass."""
        self._last = run
        self._due = None
        self.pass_number += 1
