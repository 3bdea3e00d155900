"""The decoder over one sequence or a batch: prefill, trunk, tail, full, head, accept.

Slots beyond the arena's length are scratch: `begin_cycle` reserves them, passes write them, `accept` makes a path of them
valid.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..bundle.manifest import Manifest
from ..common.errors import CapacityError, OptionError, PromptError
from ..common.validation import integer
from ..engines.base import DTYPES, Engine, View
from ..graphs.values import layer_caches
from .commit import Commit
from .device_cycle import OnDevice, is_supported
from .encoder import Encoder
from .exit_states import ExitStates
from .forward_pass import ForwardPass
from .forward_passes import ForwardPasses
from .head import HeadOutputs
from .kv_cache import BATCH_BUCKET, BUCKET, KVArena, key_value
from .logits import TargetLogits
from .prefill import OnHiddenStates, Prefill
from .prompt_chunks import Block, widest_prefill
from .states import States
from .token_tree import TokenTree
from .vision import Vision


class Decoder:
    """One model on one engine, for up to `max_batch` sequences of `max_length` positions decoded together.

    `tensor` reads a bundle's tensor by name (memory-mapped). Sequences hold places 0..batch − 1; every pass but prefill
    runs over all of them. `passes`, `exits` and `heads` are its parts.
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
        self.max_width, self.widest_tree = manifest.limits.max_width, manifest.widest_tree
        self.exact_trees = manifest.exact_trees
        info, self._end = manifest.decoder, len(manifest.segments)
        self.arena = self._allocate_arena(max_batch)
        capacity = self.arena.capacity
        most = min(max(widest_prefill(info, self.max_width), info.max_block or 0), capacity)
        self.prefill_width = max(self.max_width if info.cross_attention else most, self.max_width)
        """Most tokens of a pass over a prompt."""
        max_num_tokens = max(self.prefill_width, max_batch * self.max_width)
        self._size = info.hidden_size
        self.dtype = engine.dtype("head", "hidden")
        """Of hidden states between graphs, as this engine binds them."""
        self.encoder = Encoder(engine, manifest, tensor, max_batch) if info.cross_attention else None
        self._vision = Vision(engine)
        self.exits = ExitStates(engine, manifest, self.dtype, max_batch, max_num_tokens)
        if info.linear_attention is not None and is_supported(engine):
            raise OptionError(
                f"engine {engine.name}: the decoder of this bundle has linear attention, which runs on device 'cpu' alone"
            )
        self.states = States(engine, manifest, max_batch)
        self.passes = ForwardPasses(
            engine, manifest, tensor, self.arena, self.encoder, self.exits, self.states, max_num_tokens
        )
        self.heads = HeadOutputs(engine, manifest.text.vocab_size, max_batch, self.max_width, max_num_tokens)
        self.embedding = self.passes.embedding
        self._cache = self.passes.cache
        self._commit = Commit(engine, self.arena, info.num_layers, self.max_width, self.passes.write_indices)
        self._layout: object = None
        """Where the caches lay when passes were prepared."""
        self._moved = True
        self.exit_count = 0
        """Steps of the trunk saved in this cycle: the pending tokens and the drafts that followed them."""
        self._passed: list[list[int]] = []
        """With a `verify_width`: what passed the trunk in this cycle, by sequence."""
        self.on_device = (
            OnDevice(self.passes, self.exits, self.heads, manifest.limits) if is_supported(engine) else None
        )
        """Whole cycles of a single sequence without the host, where the engine offers them."""

    def _allocate_arena(self, max_batch: int) -> KVArena:
        engine, info, limits = self.engine, self.manifest.decoder, self.manifest.limits
        # A frozen cache is as long as the bundle's limits, however short the session's requests are.
        capacity = (limits.max_length if engine.static_cache else self.max_length) + self.max_width
        if self.manifest.target_weights is not None and engine.host_memory:
            # For the rows of a least width, whichever it will be. Plans of a device take no longer cache than the bundle's.
            capacity += self.max_width - 1
        layers = [layer_caches(info, layer) for layer in range(info.num_layers)]
        dtype = self._cache_dtype(layers)
        beside = [key_value(cache.num_kv_heads, cache.head_dim) for cache in self.manifest.attending.values()]
        arena = KVArena(
            engine, [*layers, *beside], dtype, capacity, max_batch,
            bucket=BUCKET if max_batch == 1 else BATCH_BUCKET,
            # The bound length is a part of a kernel's shape, and when it grows depends on what is drafted.
            static=engine.static_cache or self.manifest.verify_width is not None,
        )  # fmt: skip
        if engine.static_cache and arena.capacity != capacity:
            raise OptionError(
                f"max_batch: of {max_batch} sequences with {capacity} cache rows not each begins at an address that engine "
                f"{engine.name} can bind; load with max_batch=1, or build the bundle with a --max-length that makes "
                f"{arena.aligned(capacity)} rows"
            )
        return arena

    def _cache_dtype(self, layers: Sequence[Mapping[str, object]]) -> str:
        """Of the caches, as the engine's segments take them; `layers` are those of each layer by name."""
        cuts = self.manifest.decoder.cuts
        layer, name = next((number, name) for number, caches in enumerate(layers) for name in caches)
        return self.engine.dtype(f"segment.{bisect_right(cuts, layer) - 1}", f"{name}.{layer}")

    def set_least_width(self, width: int) -> None:
        """Pad every pass up to `width` tokens per sequence from now on; nothing may be cached. 1: as many as there are.

        Where the cache is no longer than the bundle says, on devices, `max_length` becomes `width` − 1 shorter. Raises
        `OptionError` for a width that no pass may have.
        """
        width = integer("least_width (of this bundle)", width, 1, self.max_width)
        self.passes.least_width = width
        self.max_length = min(self.max_length, self.arena.capacity - self.max_width - width + 1)
        self.passes.cache.clear()
        self.heads.clear()
        self.reset()

    # --- the sequences ---

    @property
    def batch(self) -> int:
        """Sequences decoded together now."""
        return self.arena.batch

    def reset(self, batch: int = 1) -> None:
        """Start with `batch` sequences that have nothing cached."""
        self.arena.reset(batch)
        for batch_index in range(batch):
            self.states.begin(batch_index)
        self.passes.positions.reset()
        if self.encoder is not None:
            self.encoder.reset(batch)
        self.exit_count = 0
        self._moved = True

    def resume(self, length: int) -> int:
        """Go on with the one sequence that is cached, cut to its first `length` slots, and what it looks at with
        cross-attention; returns its place."""
        assert self.arena.batch == 1 and self.states.length(0) <= length <= self.arena.lengths[0]
        self.passes.deepstack.clear()
        self.arena.lengths[0] = length
        self.passes.positions.offsets[0] = 0
        self.exit_count = 0
        return 0

    def clear(self, batch_index: int) -> None:
        """Zero what is cached of a sequence of which numbers are not finite: who has its place next, or grows into it,
        reads none of them."""
        self.arena.clear(batch_index)
        self.states.clear(batch_index)
        if self.encoder is not None:
            self.encoder.arena.clear(batch_index)

    def add(self) -> int:
        """A further sequence; returns its place."""
        self.passes.deepstack.clear()
        batch_index = self.arena.add()
        self.states.begin(batch_index)
        self.passes.positions.offsets[batch_index] = 0
        if self.encoder is not None:
            self.encoder.add()
        return batch_index

    def remove(self, batch_index: int) -> None:
        """Forget a sequence; the last one takes its place, and the one that is staged that of the last one."""
        offsets = self.passes.positions.offsets
        for target, source in self.arena.moves(batch_index):
            offsets[target] = offsets[source]
            self.states.replace(target, source)
        # A signal handler's exception may have ended `add` between the two.
        if self.encoder is not None and self.encoder.arena.batch == self.arena.batch:
            self.encoder.remove(batch_index)
        self.arena.remove(batch_index)

    def stage(self) -> None:
        """Let the last sequence, whose prompt is not through yet, stand aside: passes run over those before it, and any of
        them may leave. None is added until `unstage`."""
        self.arena.stage()
        if self.encoder is not None:
            self.encoder.stage()

    def unstage(self) -> int:
        """Take the sequence that stands aside back as the last one; returns its place."""
        if self.encoder is not None:
            self.encoder.unstage()
        return self.arena.unstage()

    # --- one request: image embeddings, encoder, prefill ---

    def image_embeds(self, inputs: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Run `vision` on each mapping of inputs; hidden states [n, E] in order."""
        return self._vision.run(inputs)

    def embed(
        self,
        token_ids: np.ndarray,
        image_embeds: np.ndarray | None = None,
        image_positions: np.ndarray | None = None,
    ) -> np.ndarray:
        """Hidden states [n, E] of a prompt; `image_embeds`, in order, replace the embeddings at `image_positions` (by
        default: where the ids are `text.image_token_id`). With `deepstack_layers` they are [n, (1 + layers) · E]: behind
        what enters the first layer stands what is added behind each of those, of text zero. Raises `PromptError` where
        positions and `image_embeds` are not as many."""
        ids = np.asarray(token_ids, np.int64)
        if image_embeds is None:
            return self.passes.deepstack.widened(self.embedding.embeddings(ids))
        if image_positions is None:
            image_positions = np.flatnonzero(ids == self.manifest.text.image_token_id)
        if len(image_positions) != len(image_embeds):
            raise PromptError(
                f"the prompt has {len(image_positions)} image slots for {len(image_embeds)} image rows"
            )
        if len(image_positions) == len(ids):  # nothing but images: their placeholders need no embedding
            hidden_states = np.empty((len(ids), image_embeds.shape[1]), DTYPES[self.dtype])
        else:
            hidden_states = self.passes.deepstack.widened(self.embedding.embeddings(ids))
        hidden_states[image_positions] = image_embeds
        return hidden_states

    def encode(self, batch_index: int, encoder_hidden: np.ndarray) -> None:
        """Models with cross-attention: what a sequence looks at, hidden states [n, E]."""
        assert self.encoder is not None, "this model has no cross-attention"
        self.encoder.run(batch_index, encoder_hidden)
        self._moved = True

    def prefill(
        self,
        hidden_states: np.ndarray,
        batch_index: int = 0,
        positions: np.ndarray | None = None,
        on_hidden_states: OnHiddenStates | None = None,
        blocks: Sequence[Block] = (),
    ) -> TargetLogits:
        """A whole prompt (`Prefill`); what the target says after its last token."""
        prefill = Prefill(self, hidden_states, batch_index, positions, on_hidden_states, blocks)
        while (logits := prefill.step()) is None:
            pass
        return logits

    # --- one cycle ---

    def begin_cycle(self, width: int) -> None:
        """Reserve `width` slots after every sequence and forget the exit states. Raises `CapacityError`."""
        if width > self.widest_tree:
            limit = "max_width" if self.passes.verify_width is None else "verify_width"
            raise CapacityError(
                f"a cycle of width {width}; the bundle was built with {limit} {self.widest_tree}"
            )
        self.reserve(self.passes.reserve(width))
        self.exit_count = 0
        self._passed = [[] for _ in range(self.arena.batch)]

    def reserve(self, slots: int, batch_index: int | None = None) -> None:
        """Bind caches that hold so many slots after every sequence, or after one. Raises `CapacityError`."""
        if self.arena.reserve(slots, batch_index) or self._moved:
            self._forget_moved()

    def trunk(self, cut: int, tokens: Sequence[int], trees: Sequence[TokenTree] | None = None) -> None:
        """Run segments 0..cut−1 over the next token of every sequence; their hidden states after every segment become
        exit states of step `exit_count`. Each token follows the one of the step before, or, with `trees`, is the node
        of that number of its sequence's tree (a chain beyond the tree's end)."""
        passes, step, batch = self.passes, self.exit_count, self.arena.batch
        width = passes.padded(1)
        forward_pass = self._cache.get((0, cut, width, step, 0, batch)) or passes.prepare(0, cut, width, step)
        self.exit_count = step + 1
        if passes.verify_width is None:
            if width > 1:  # rows behind a token lie where later steps write
                tokens = [token for token in tokens for _ in range(width)]
            passes.run(forward_pass, tokens, trees, step)
            return
        # Nodes that have passed pass again, each in its own place and slot: a pass of this width has room for no others.
        token_ids: list[int] = []
        for own, token in zip(self._passed, tokens, strict=True):
            own.append(token)
            token_ids += [*own, *own[-1:] * (width - len(own))]
        passes.run(forward_pass, token_ids, trees)

    def exit_hidden(self, cut: int, step: int) -> View:
        """Hidden states [batch, 1, E] after segment `cut` − 1 that the trunk saved at `step` of this cycle."""
        return self.exits.view(cut, self.arena.batch, 1, step)

    def tail(self, cut: int, count: int, trees: Sequence[TokenTree] | None = None) -> None:
        """Run segments cut.. over the first `count` exit states of every sequence, chains where no `trees` are given.

        Follow with `head`; the order is as after `full`.
        """
        assert count == self.exit_count, f"{self.exit_count} exit states, {count} nodes to verify"
        passes, end, batch = self.passes, self._end, self.arena.batch
        width = passes.padded(count)
        forward_pass = self._cache.get((cut, end, width, 0, 0, batch)) or passes.prepare(cut, end, width)
        if forward_pass.hidden is not None:
            self.exits.gather(forward_pass, cut, count)
        passes.run(forward_pass, None, trees)
        self.exits.last_tail = passes.number, cut, count

    def full(self, *trees: TokenTree) -> None:
        """Run all segments over one tree per sequence, padded to the widest, to the least width or to `verify_width`.
        Follow with `head`.

        The logits of node i of sequence b are at b × width + i, where width is the largest tree's size, or what it is
        padded to.
        """
        passes, batch, end, tokens = self.passes, self.arena.batch, self._end, trees[0].tokens
        assert len(trees) == batch, f"{len(trees)} trees for a batch of {batch}"
        width = passes.padded(len(tokens))
        if batch > 1 or width > len(tokens):
            width = passes.padded(max(map(len, trees)))
            # Padding repeats a token of its own sequence: its numbers are as finite as the sequence is.
            tokens = [
                token for tree in trees for token in (*tree.tokens, *tree.tokens[-1:] * (width - len(tree)))
            ]
        forward_pass = self._cache.get((0, end, width, 0, 0, batch)) or passes.prepare(0, end, width)
        passes.run(forward_pass, tokens, trees)

    def head(self, num_logits: int, first: int = 0) -> TargetLogits:
        """What the target says after tokens first.. of the last pass; valid until the next `head`."""
        last, heads = self.passes.last, self.heads
        if first == 0:
            return (last.heads.get(num_logits) or heads.over_first(last, num_logits)).run()
        return heads.over(last, range(first, first + num_logits)).run()

    def head_of(self, trees: Sequence[TokenTree]) -> TargetLogits:
        """What the target says after the nodes of `trees`, one tree after the other, after `full` or `tail`."""
        passes, num_tokens = self.passes, 0
        last, width = passes.last, passes.last.width
        for tree in trees:
            num_tokens += len(tree.tokens)
        most = len(trees) * width
        if num_tokens == most or (passes.is_padded and len(trees) == 1):
            return (last.heads.get(most) or self.heads.over_first(last, most)).run()
        places: list[int] = []
        for number, tree in enumerate(trees):
            places += range(number * width, number * width + len(tree))
        least = passes.least_width if passes.verify_width is None else most
        places += places[-1:] * (least - num_tokens)
        return self.heads.over(last, places).run()

    def accept(self, tree: TokenTree, path: Sequence[int], batch_index: int = 0) -> None:
        """Make the root and the nodes of `path` of a sequence valid; everything else of it is forgotten."""
        self._commit.move(path, batch_index)
        self.arena.advance(1 + len(path), batch_index)
        self.exit_count = 0

    def accept_all(self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]]) -> None:
        """`accept` for every sequence after one pass over all; slots are moved by one call, and only for trees."""
        for tree in trees:
            if not tree.is_chain:
                self._commit.move_all(paths)
                break
        for batch_index, path in enumerate(paths):
            self.arena.advance(1 + len(path), batch_index)
        self.exit_count = 0

    def _forget_moved(self) -> None:
        """Forget prepared passes unless they are bound to what the arenas hold where they hold it now."""
        self._moved = False
        if self.passes.layout != self._layout:
            self._layout = self.passes.layout
            self._cache.clear()
            self.heads.clear()
            self._commit.clear()

    # --- what drafts read ---

    def verified_hidden(self, batch_index: int, nodes: int) -> View:
        """Hidden states [1, nodes, E] before the final norm of the first nodes of a sequence, after `full` or `tail`:
        where they lie until the next pass."""
        last, size = self.passes.last, self._size
        offset = last.result.offset + batch_index * last.width * size
        return last.result.buffer.view((1, nodes, size), self.dtype, offset)

    def hidden_after(self, layer: int) -> View:
        """Hidden states [batch, width, E] of the last pass after `layer` layers, one of the drafts' `taps` or the layer
        of one that attends."""
        return self.exits.hidden_after(layer, self.passes.last, self.passes.number)

    @property
    def pass_number(self) -> int:
        """Of the last pass."""
        return self.passes.number

    @property
    def last_batch_index(self) -> int:
        """The first sequence of the last pass."""
        return self.passes.last.batch_index

    def offset_of(self, hidden_states: View) -> int:
        """Where hidden states of the last pass begin among all of it, in elements."""
        return hidden_states.offset - self.passes.last.result.offset

    def draft_layer_index(self, draft: str) -> int:
        """The layer of the arena where a draft that attends keeps its keys and values."""
        return self.manifest.decoder.num_layers + list(self.manifest.attending).index(draft)

    def bind_partial(self, graph: str, attention: Sequence[int]) -> ForwardPass:
        """The pass of `graph`, a decoder that has the attention of these layers only
        (`ForwardPasses.prepare_partial`)."""
        return self.passes.prepare_partial(graph, attention)

    def run_partial(self, forward_pass: ForwardPass, tokens: Sequence[int], step: int) -> None:
        """Run a pass of `bind_partial` over the next token of every sequence, `step` slots behind what is valid of it.
        What it writes is scratch: a pass over all segments must follow that writes these slots of every layer anew."""
        self.passes.run(forward_pass, tokens, None, step)
