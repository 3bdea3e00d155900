"""Passes of the decoder: binds segments to buffers with fixed addresses, writes what a pass reads, and runs it.

A pass of a given shape is prepared once (calls bound, host arrays sliced), so that a step writes embeddings, masks and
indices, and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..bundle.manifest import Manifest
from ..engines.base import Engine, View
from ..engines.buffers import HostBuffer
from ..graphs.values import embedding_tensors
from .attention_masks import AttentionMasks
from .deepstack import DeepStack
from .embedding import Embedding
from .encoder import Encoder
from .exit_states import ExitStates
from .fast_path import chain_step, embedding_writer
from .forward_pass import PREFILL_WIDTH, ChainStep, ForwardPass
from .kv_cache import KVArena
from .positions import Positions
from .prompt_chunks import Block
from .states import States
from .token_tree import TokenTree

PassKey = tuple[object, ...]


class ForwardPasses:
    """Prepares and runs passes over the sequences of `arena`: from tokens, or from exit states; into exit states where
    the pass ends before the last segment."""

    def __init__(
        self,
        engine: Engine,
        manifest: Manifest,
        tensor: Callable[[str], np.ndarray],
        arena: KVArena,
        encoder: Encoder | None,
        exits: ExitStates,
        states: States,
        max_num_tokens: int,
    ):
        """`tensor` reads a bundle's tensor by name; at most `max_num_tokens` tokens per pass."""
        self.engine, self.arena, self.exits, self.states = engine, arena, exits, states
        self.segments = manifest.segments
        self.verify_width = manifest.verify_width
        """Tokens of every pass but prefill, where kernels give other bits at other widths; None: as many as are
        verified."""
        self.least_width = 1
        """Tokens of the narrowest pass of a sequence, where kernels give other bits at fewer (`set_least_width`)."""
        info = self._info = manifest.decoder
        capacity, size = arena.capacity, info.hidden_size
        hidden_dtype = engine.dtype("head", "hidden")
        self._hidden = [
            HostBuffer(engine, f"hidden.{index}", max_num_tokens * size, hidden_dtype) for index in range(2)
        ]
        self.write_indices = HostBuffer(engine, "write_indices", arena.max_batch, "int64")
        self.masks = AttentionMasks(engine, manifest, tensor, capacity, max_num_tokens)
        self.positions = Positions(engine, info, max_num_tokens, capacity, arena.max_batch)
        tables = {name: tensor(name) for name in embedding_tensors(manifest)}
        most, scale = min(max_num_tokens, PREFILL_WIDTH, capacity), info.embedding_scale
        self.embedding = Embedding(engine, tables, self._hidden[0], max_num_tokens, most, scale)
        self.deepstack = DeepStack(engine, info, max_num_tokens, hidden_dtype)
        self._encoder, self._direct = encoder, engine.host_memory
        self.cache: dict[PassKey, ForwardPass] = {}
        """Passes by (first segment, end, width, step, first sequence, sequences), or by a graph and its sequences."""
        self.last: ForwardPass
        """The last pass."""
        self.number = 0
        """Of the last pass."""

    @property
    def layout(self) -> object:
        """Where caches lie: passes are prepared anew when it changes."""
        return self.arena.cache_len, None if self._encoder is None else self._encoder.cache_len

    @property
    def is_padded(self) -> bool:
        """Whether a pass may have rows behind its nodes, alone or in a batch."""
        return self.verify_width is not None or self.least_width > 1

    def padded(self, width: int) -> int:
        """Tokens per sequence of a pass over `width` nodes."""
        return self.verify_width or max(width, self.least_width)

    def reserve(self, width: int) -> int:
        """Slots that a cycle of `width` nodes writes of every sequence: each step of the trunk is a pass of its own, and
        rows that pad the last one lie behind its nodes."""
        return self.verify_width or width + self.least_width - 1

    # --- preparation ---

    def prepare(
        self, first: int, end: int, width: int, step: int = 0, batch_index: int = 0, batch: int | None = None
    ) -> ForwardPass:
        """Bind segments first..end−1 over [batch, width] hidden states of sequences batch_index..: from `hidden.0`, or
        from the exit states where they lie as the tail needs them; into the exit states of `step` when the pass ends
        before the last segment. `batch` None: all sequences."""
        arena, exits = self.arena, self.exits
        count = arena.batch if batch is None else batch
        key = (first, end, width, step, batch_index, count)
        if key in self.cache:
            return self.cache[key]
        forward_pass, shared = self._new_pass(count, width, batch_index)
        padded = self.is_padded and batch is None
        in_place = first > 0 and not padded and (width == 1 or exits.is_contiguous(count))
        source = exits.view(first, count, width) if in_place else self._add_input(forward_pass)
        trunk = end < len(self.segments)
        for number in range(first, end):
            cut = number + 1
            if trunk and not padded:
                target = exits.view(cut, count, width, step)
            else:
                target = exits.tap(cut, count, width) or self._hidden[(cut - first) % 2].view(source.shape)
            self._bind_segment(forward_pass, number, source, target, shared)
            source = target
            if trunk and padded:
                node = 0 if self.verify_width is None else step
                forward_pass.calls += exits.copies_of_nodes(cut, step, target, node)
        return self._keep(key, forward_pass, source)

    def prepare_partial(self, graph: str, attention: Sequence[int]) -> ForwardPass:
        """Bind `graph`, a decoder that has the attention of these layers only, over one hidden state of every sequence:
        from `hidden.0` to `hidden.1`, beside what passes over segments leave. It reads and writes their keys and
        values."""
        batch = self.arena.batch
        key = (graph, batch)
        if key in self.cache:
            return self.cache[key]
        forward_pass, inputs = self._new_pass(batch, 1, 0)
        inputs = self.masks.read_by(attention, inputs)
        inputs["hidden"] = self._add_input(forward_pass)
        result = self._hidden[1].view(inputs["hidden"].shape)
        inputs |= self.deepstack.views(range(self._info.num_layers), result.shape)
        outputs = {"hidden_out": result}
        for layer in attention:
            caches, updated = self.arena.bindings(layer, layer + 1, 0, batch)
            inputs |= caches
            outputs |= updated
            if self._encoder is not None:
                inputs |= self._encoder.bindings(1, layer, layer + 1, 0, batch)
        positions = self.positions.attach(forward_pass, 0, attention)
        if positions is not None:
            inputs["positions"] = positions
        forward_pass.calls.append(self.engine.bind(graph, inputs, outputs))
        return self._keep(key, forward_pass, result)

    def _new_pass(self, batch: int, width: int, batch_index: int) -> tuple[ForwardPass, dict[str, View]]:
        """A pass without calls, and what all of its graphs are told of where its tokens stand."""
        forward_pass = ForwardPass(batch, width, batch_index)
        self.masks.attach(forward_pass, self.arena.cache_len)
        forward_pass.indices = self.write_indices.host((batch,))
        forward_pass.pushes.append((self.write_indices, (batch,)))
        slots = self.write_indices.view((batch,))
        return forward_pass, {**self.masks.views(forward_pass), "write_indices": slots}

    def _add_input(self, forward_pass: ForwardPass) -> View:
        """Where the embeddings of tokens enter a pass."""
        batch, width, size = forward_pass.batch, forward_pass.width, self._info.hidden_size
        forward_pass.hidden = self._hidden[0].host((batch, width, size))
        forward_pass.embeds = forward_pass.hidden.reshape(batch * width, size)
        forward_pass.input = self._hidden[0].view((batch, width, size))
        return forward_pass.input

    def _bind_segment(
        self, forward_pass: ForwardPass, number: int, source: View, target: View, shared: dict[str, View]
    ) -> None:
        first, end = self._info.cuts[number : number + 2]
        batch, batch_index = forward_pass.batch, forward_pass.batch_index
        inputs, outputs = self.arena.bindings(first, end, batch_index, batch)
        states, kept = self.states.bindings(range(first, end), batch_index, batch)
        told = self.masks.read_by(range(first, end), shared) | self.states.attach(forward_pass, number)
        inputs |= {"hidden": source, **told, **states}
        inputs |= self.deepstack.views(range(first, end), target.shape)
        positions = self.positions.attach(forward_pass, first, range(first, end))
        if positions is not None:
            inputs["positions"] = positions
        if self._encoder is not None:
            inputs |= self._encoder.bindings(forward_pass.width, first, end, batch_index, batch)
        outputs |= {"hidden_out": target, **kept}
        forward_pass.calls.append(self.engine.bind(self.segments[number], inputs, outputs))

    def _keep(self, key: PassKey, forward_pass: ForwardPass, result: View) -> ForwardPass:
        """A pass that is whole, kept under `key`."""
        forward_pass.result = result
        alone = forward_pass.batch_index == 0 and forward_pass.batch == self.arena.batch == 1
        if self._direct and alone and self.embedding.lookup:
            forward_pass.chain_step = self._chain_step(forward_pass)
        self.cache[key] = forward_pass
        return forward_pass

    def _chain_step(self, forward_pass: ForwardPass) -> ChainStep:
        """What `_embed_tokens`, `_write_positions` and `_launch` do for a chain of one sequence."""
        fill = write = None
        if forward_pass.hidden is not None:
            fill = embedding_writer(forward_pass.embeds, self.embedding)
        if forward_pass.positions is not None:
            places, width = forward_pass.positions, forward_pass.width
            write_chain = self.positions.write_chain
            write = lambda start: write_chain(places, 0, start, width)  # noqa: E731
        seen, states = self.masks.seen(forward_pass), self.states.step_of(forward_pass, self.arena.lengths)
        return chain_step(forward_pass, seen, self._encoder, fill, write, states)

    # --- running ---

    def run(
        self,
        forward_pass: ForwardPass,
        tokens: Sequence[int] | None,
        trees: Sequence[TokenTree] | None,
        step: int | None = None,
    ) -> None:
        """Run over `tokens` [batch × width], or over the hidden states that lie there: whole trees, or their nodes of
        number `step`. Without `trees`, and beyond a tree's end, every token follows the one before."""
        if forward_pass.chain_step is not None and (trees is None or trees[0].is_chain):
            forward_pass.chain_step(tokens, self.arena.lengths[0] + (step or 0))
            self.set_last(forward_pass)
            return
        if tokens is not None:
            self._embed_tokens(forward_pass, tokens)
        self._write_positions(forward_pass, trees, step)
        self._launch(forward_pass)

    def run_prompt(
        self,
        forward_pass: ForwardPass,
        hidden_states: np.ndarray,
        start: int,
        positions: np.ndarray | None,
        blocks: Sequence[Block] = (),
    ) -> None:
        """Run over `Decoder.embed`'s hidden states of n ≤ width tokens of one prompt, in slots from `start` on, at
        `positions` [axes, n] (None: their slots); `blocks` of them see themselves in both directions. The padding's keys
        lie beyond the length and are overwritten."""
        hidden, count, size = forward_pass.hidden, len(hidden_states), self._info.hidden_size
        assert hidden is not None
        hidden[0, :count] = hidden_states[:, :size]
        hidden[0, count:] = 0
        self._hidden[0].push(hidden.shape)
        forward_pass.indices[0] = start
        self.masks.write_prompt(forward_pass, start, blocks)
        self.positions.write_prompt(forward_pass, start, positions)
        self.states.write_prompt(forward_pass, start, count)
        with self.deepstack.adding(hidden_states[:, size:]):
            self._launch(forward_pass)

    def _embed_tokens(self, forward_pass: ForwardPass, tokens: Sequence[int]) -> None:
        """Embeddings of `tokens` [batch × width], on the engine's side."""
        if self.embedding.lookup:  # on engines in host memory
            self.embedding.fill(forward_pass.embeds, tokens)
        else:
            self.embedding.run(tokens, (forward_pass.batch, forward_pass.width))

    def _write_positions(
        self, forward_pass: ForwardPass, trees: Sequence[TokenTree] | None, step: int | None = None
    ) -> None:
        """Write indices, masks and positions of the tokens that `run` names."""
        lengths, ahead, width = self.arena.lengths, step or 0, forward_pass.width
        self.states.write_cycle(forward_pass, lengths, ahead)
        for batch_index in range(forward_pass.batch):
            length = lengths[batch_index]
            start = length + ahead
            forward_pass.indices[batch_index] = start
            if trees is None or (tree := trees[batch_index]).is_chain or ahead >= len(tree.tokens):
                self.masks.write_chain(forward_pass, batch_index, start)
                if forward_pass.positions is not None:
                    self.positions.write_chain(forward_pass.positions, batch_index, start, width)
            elif step is None:
                self.masks.write_tree(forward_pass, batch_index, start, tree)
                self.positions.write_nodes(forward_pass, batch_index, length, tree.depths)
            else:
                self.masks.write_node(forward_pass, batch_index, length, tree, step)
                self.positions.write_nodes(forward_pass, batch_index, length, tree.depths[step : step + 1])

    def _launch(self, forward_pass: ForwardPass) -> None:
        """Run a pass whose hidden states lie with the engine, and whose places the host wrote."""
        self.refresh(forward_pass)
        if not self._direct:
            for buffer, shape in forward_pass.pushes:
                buffer.push(shape)
        for call in forward_pass.calls:
            call.run()
        self.set_last(forward_pass)

    def refresh(self, forward_pass: ForwardPass) -> None:
        """Show a pass what cross-attention may see now."""
        if self._encoder is not None and forward_pass.encoder_version != self._encoder.version:
            forward_pass.encoder_version = self._encoder.write_mask(
                forward_pass.width, forward_pass.batch_index, forward_pass.batch
            )

    def set_last(self, forward_pass: ForwardPass) -> None:
        """`forward_pass` was the last pass."""
        self.last = forward_pass
        self.number += 1
