"""EAGLE: a layer of its own goes on from the target's features (Li et al., arXiv 2401.15077; trees: EAGLE-2, arXiv
2406.16858).

Pair i, the target's feature of token i with token i + 1, lies in slot i of the layer's own keys and values, at position
i, or where the layer reads positions with axes at the target's own of token i; a kind that leaves pairs out has them
closer together, at the same positions. A cycle first runs the pairs
that the last one made known, with the target's features (those that the layer had given in their place are never kept);
the last of them has the pending token. From there the tree grows level by level in the slots behind, out of the layer's
own features: nobody needs to take them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import exp, isfinite
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...common.errors import BundleError
from ...common.foreign_errors import raise_if_foreign
from ...decoder.device.draft_chain import DeviceChain
from ...decoder.forward_pass import PREFILL_STEP
from ...decoder.logits import not_finite
from ...decoder.positions import positions_of_slots
from ...decoder.token_tree import TokenTree
from ...engines.base import DTYPES, Call, View
from ...speculative.proposer import Proposer
from ...speedup.budget import Budget
from .dynamic_tree import Growth
from .layer_pass import Beside, EaglePass
from .layer_role import LayerOptions

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...decoder.device.draft_chain import Keep
    from ...sampling.verify import Verdict
    from ...speculative.sequence import Sequence


_Pairs = tuple[np.ndarray, np.ndarray]
"""Which pairs of a sequence, and the indices of their features, int64 [n] each."""


@dataclass
class _Growing:
    """A tree that grows in one place of a pass."""

    sequence: Sequence
    growth: Growth
    feature_index: dict[int, int]
    """Node → its place in the pass that gave its feature; of the level before and of the root."""
    slots: dict[int, int]
    """Node → the slot of its pair."""
    done: bool = False


class Eagle(Proposer):
    """The draft kind `eagle`. Keeps, by open sequence, the pairs that were run with the target's features, and the
    hidden states of the target whose pairs were not.

    Raises `BundleError` for a draft without its graph or its cache. A sequence whose layer gives no numbers ends with
    that error.
    """

    needs_prompt_hidden: ClassVar[bool] = True
    needs_hidden: ClassVar[bool] = True
    role: ClassVar[str] = "eagle"

    def __init__(self, draft: DraftInfo, decoder: Decoder):
        graph, cache = draft.graphs.get(self.role), draft.options.own_cache
        ranks = draft.options.ranks if isinstance(draft.options, LayerOptions) else None
        if graph is None or cache is None or ranks is None:
            raise BundleError(
                f"manifest: draft {draft.name!r} has no graph of a layer; build the bundle again"
            )
        self.name, self._graph = draft.name, graph
        self.draft_graph = graph
        self._vocabulary = decoder.manifest.text.vocab_size
        self._engine, batch = decoder.engine, decoder.arena.max_batch
        self._size, self._dtype, self._slots = (
            decoder.manifest.decoder.hidden_size,
            decoder.dtype,
            decoder.max_width,
        )
        self._widest = decoder.prefill_width
        self._pass = EaglePass(
            draft.name, graph, decoder, cache, ranks, self._widest, self._beside(graph, decoder)
        )
        self._arena = self._pass.arena
        # Hidden states of the target that wait for the next pass: [places, slots, E].
        self._hidden_states = self._engine.allocate(
            f"{draft.name}.hidden_states",
            batch * self._slots * self._size * DTYPES[self._dtype].itemsize,
            zeroed=True,
        )
        self._all_hidden = self._hidden_states.view((batch * self._slots, self._size), self._dtype)
        self._open: list[Sequence] = []
        """In the order of their places."""
        self._waiting: list[int] = []
        """How many of each place wait."""
        self._next: list[int] = []
        """Each place's next pair."""
        self._ended: Sequence | None = None
        """The only sequence that is open, after its end: the next request may go on behind its slots."""
        self._resumed = False
        """Whether the next one does."""

    def _beside(self, graph: str, decoder: Decoder) -> Beside | None:
        """Inputs that the graph of this kind has beside those of every layer."""
        return None

    @property
    def resumable(self) -> int:
        """Every pair that was run for the last request, which had the arena for itself; hidden states that wait are let
        go."""
        return 0 if self._ended is None else self._next[0]

    def resume(self, length: int) -> None:
        """Keep the first pairs of the last request for the next one."""
        assert self._ended is not None
        self._arena.lengths[0] = self._slots_before(self._ended, length)
        self._next[0], self._waiting[0], self._resumed = length, 0, True

    def _slots_before(self, sequence: Sequence, position: int) -> int:
        """How many pairs of a prompt and its answer before `position` the layer runs."""
        return position

    def on_hidden_states(self, sequence: Sequence, slot: int, hidden_states: View) -> None:
        """Run the pairs of a chunk; the last hidden state of a prompt waits for the first token."""
        if sequence not in self._open and self._ended is not None:
            if self._resumed:
                self._open[0] = sequence
                self._ended, self._resumed = None, False
            else:
                self._forget(self._ended)
        if sequence not in self._open:
            self._arena.add()
            self._open.append(sequence)
            self._waiting.append(0)
            self._next.append(0)
        place, count = self._open.index(sequence), hidden_states.shape[1]
        assert self._next[place] == slot, "a prompt whose first positions this draft has not seen"
        ends = slot + count == len(sequence.prompt_ids)
        behind = slot + count - ends
        kept = self._kept(sequence, slot, behind)
        if len(kept):
            ahead = self._arena.capacity - self._arena.lengths[place]
            width = min(-(-len(kept) // PREFILL_STEP) * PREFILL_STEP, self._widest, ahead)
            self._arena.reserve(width, place)
            features = hidden_states.buffer.view((count, self._size), self._dtype, hidden_states.offset)
            self._run_pairs([sequence], place, width, [(kept, kept - slot)], features)
        self._next[place] = behind
        if ends:
            self._keep(place, hidden_states, [count - 1])

    def _kept(self, sequence: Sequence, first: int, end: int) -> np.ndarray:
        """Positions, of pairs first..end − 1 of a prompt, of those that the layer runs: int64 [n], rising."""
        return np.arange(first, end)

    def _mark(self, sequence: Sequence, batch_index: int, positions: np.ndarray) -> None:
        """Write what the graph of this kind takes beside the pairs of the prompt at `positions`, at `batch_index` of
        the pass that begins."""

    def propose(self, sequences: Items[Sequence], budgets: Items[Budget]) -> list[TokenTree]:
        """Chains of the likeliest tokens, or trees of the likeliest paths where the budget has room for branches."""
        growths = {
            self._open.index(sequence): Growth(sequence.tokens[-1], budget, sequence.limits.eos_token_ids)
            for sequence, budget in zip(sequences, budgets, strict=True)
        }
        lasts = [max(count - 1, 0) for count in self._waiting]
        ids, scores, width = self._catch_up(max(sum(growth.widths) for growth in growths.values()))
        trees = {
            place: _Growing(self._open[place], growth, {0: place * width + lasts[place]}, {})
            for place, growth in growths.items()
        }
        for place, tree in trees.items():
            self._expand(tree, 0, ids[place], scores[place])
        self._grow(trees, width)
        return [self._finished(trees[self._open.index(sequence)]) for sequence in sequences]

    def propose_on_device(self, sequence: Sequence, budget: Budget) -> DeviceChain | TokenTree:
        """A chain: a pass over the pairs that wait, and one for every further token. A threshold, and a tree, ask the
        host after every level."""
        policy, waiting = sequence.policy, self._waiting[0]
        asks = policy is not None and policy.needs_confidence
        if asks or budget.nodes > budget.depth or len(self._open) > 1 or not waiting:
            return super().propose_on_device(sequence, budget)
        count, arena = budget.nodes, self._arena
        # Of one width whatever was accepted, so that few programs serve; what lies beyond the pairs is overwritten.
        width = max(waiting, count + 1)
        arena.reserve(max(width, waiting + count - 1), 0)
        pairs, feature_index = self._waiting_pairs(0)
        start, first = arena.lengths[0], self._next[0]
        positions = self._positions(sequence, first + np.arange(waiting + count - 1))
        sent = self._pass.chain_inputs(
            width, count, start, positions, feature_index, _tokens(sequence, pairs)
        )
        arena.advance(waiting, 0)
        self._next[0], self._waiting[0] = first + waiting, 0

        def bind(given: Mapping[str, View], keep: Keep) -> list[Call]:
            return self._pass.chain(self._all_hidden, width, count, given, keep)

        return DeviceChain((self._all_hidden.address, width, count, arena.cache_len), count, sent, bind)

    def advance(
        self, sequence: Sequence, tree: TokenTree, verdict: Verdict, hidden_states: View | None
    ) -> None:
        """Keep the hidden states of the root and of the accepted nodes: their pairs are known now."""
        assert hidden_states is not None
        place, nodes = self._open.index(sequence), [0, *verdict.path]
        if self._waiting[place] + len(nodes) > self._slots:  # nothing was proposed for a while
            waiting = self._waiting[place]
            self._arena.reserve(waiting, place)
            self._run_pairs([sequence], place, waiting, [self._waiting_pairs(place)], self._all_hidden)
            self._waiting[place] = 0
        self._keep(place, hidden_states, nodes)

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence; the last one takes its place. One that was alone may be gone on with."""
        if sequence not in self._open:
            self._resumed = False
        elif len(self._open) == 1 and sequence.finish_reason not in (None, "error"):
            self._ended = sequence
        else:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if sequence is self._ended:
            self._ended = None
        place, last = self._open.index(sequence), len(self._open) - 1
        if sequence.finish_reason in (None, "error"):
            # Numbers that are not finite may lie there, and 0 × NaN is NaN where slots are masked.
            self._arena.clear(place)
        self._arena.remove(place)
        if place != last:
            moved = self._waiting[last]
            self._copy(place * self._slots, self._hidden_of(last, moved))
        for known in (self._open, self._waiting, self._next):
            known[place] = known[last]  # type: ignore[call-overload]
            known.pop()
        if not self._open:
            self._arena.reset(0)

    # --- pairs with the target's features ---

    def _catch_up(self, growing: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Run the pairs of all hidden states that wait, of every open sequence, and make room for `growing` slots
        behind them; the proposals after the last pair of each place, and the width of the pass."""
        arena, waiting = self._arena, self._waiting
        width = max(1, *waiting)
        needed = max(
            length + max(width, count + growing)
            for length, count in zip(arena.lengths, waiting, strict=False)
        )
        arena.reserve(min(needed, arena.capacity) - arena.length)
        pairs = [self._waiting_pairs(place) for place in range(len(waiting))]
        ids, scores = self._run_pairs(self._open, 0, width, pairs, self._all_hidden)
        self._waiting = [0] * len(waiting)
        return ids, scores, width

    def _waiting_pairs(self, batch_index: int) -> _Pairs:
        """Of the hidden states of a place that wait."""
        count = np.arange(self._waiting[batch_index])
        return self._next[batch_index] + count, batch_index * self._slots + count

    def _positions(self, sequence: Sequence, pairs: np.ndarray) -> np.ndarray:
        """Of these pairs of a sequence, also of ones that are drafted: int64 [axes, n]."""
        if self._pass.axes == 1:
            return pairs[None]
        positions = positions_of_slots(sequence.prompt_positions, pairs)
        return np.broadcast_to(positions, (self._pass.axes, len(pairs)))

    def _run_pairs(
        self, sequences: Items[Sequence], batch_index: int, width: int, pairs: Items[_Pairs], features: View
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the next pairs of sequences in places batch_index..: these, out of the features with these indices
        of `features` [n, E], each with the token that follows. The proposals after each sequence's last pair."""
        sources, tokens, positions, starts, mask = self._pass.begin(len(sequences), width, batch_index)
        slots, row_index = np.arange(mask.shape[-1]), np.empty(len(sequences), np.int64)
        for index, (sequence, (where, mine)) in enumerate(zip(sequences, pairs, strict=True)):
            start, count = self._arena.lengths[batch_index + index], len(mine)
            # Padding repeats a feature of its own sequence.
            sources[index], tokens[index] = mine[0] if count else (batch_index + index) * self._slots, 0
            positions[index] = self._positions(sequence, np.array([self._next[batch_index + index]]))
            sources[index, :count], positions[index, :, :count] = mine, self._positions(sequence, where)
            tokens[index, :count] = _tokens(sequence, where)
            starts[index] = start
            mask[index] = slots <= start + np.arange(width)[:, None]
            row_index[index] = index * width + max(count - 1, 0)
            if count and where[0] < len(sequence.prompt_ids) - 1:
                self._mark(sequence, index, where)
        proposals = self._pass.run(features, row_index, batch_index)
        for index, (where, mine) in enumerate(pairs):
            self._arena.advance(len(mine), batch_index + index)
            if len(mine):
                self._next[batch_index + index] = int(where[-1]) + 1
        return proposals

    # --- growth ---

    def _grow(self, trees: dict[int, _Growing], before: int) -> None:
        """Expand level after level of all trees together; `before` is the width of the pass that gave the features of
        the roots."""
        arena, batch = self._arena, len(self._open)
        used = dict.fromkeys(range(batch), 0)
        for level in range(max(len(tree.growth.widths) for tree in trees.values())):
            room = min(arena.cache_len - arena.lengths[place] - used[place] for place in range(batch))
            frontiers = {
                place: tree.growth.frontier(min(tree.growth.widths[level], room))
                for place, tree in trees.items()
                if not tree.done and level < len(tree.growth.widths)
            }
            width = max(map(len, frontiers.values()), default=0)
            if not width:
                return
            sources, tokens, positions, starts, mask = self._pass.begin(batch, width)
            for place in range(batch):
                start = arena.lengths[place]
                # Padding repeats a feature of its own sequence: it is as finite as the sequence is.
                sources[place], tokens[place] = place * before, 0
                at = np.array([self._next[place] + level])
                positions[place] = self._positions(self._open[place], at)
                starts[place] = start + used[place]
                mask[place], mask[place, :, :start] = False, True
                for index, node in enumerate(frontiers.get(place, ())):
                    tree = trees[place]
                    tree.slots[node] = start + used[place] + index
                    sources[place, index] = tree.feature_index[tree.growth.parents[node]]
                    tokens[place, index] = tree.growth.tokens[node]
                    mask[place, index, [tree.slots[above] for above in tree.growth.path(node)]] = True
            ids, scores = self._pass.run(None, np.arange(batch * width))
            for place, nodes in frontiers.items():
                trees[place].feature_index = {}
                for index, node in enumerate(nodes, place * width):
                    trees[place].feature_index[node] = index
                    self._expand(trees[place], node, ids[index], scores[index])
                used[place] += len(nodes)
            before = width

    def _expand(self, tree: _Growing, node: int, ids: np.ndarray, scores: np.ndarray) -> None:
        """Add the children of a node; a sequence whose numbers are not finite fails."""
        best, growth = scores.tolist(), tree.growth
        # NaN or +inf anywhere in the logits makes the sum of their exponentials that, and all values NaN.
        if not isfinite(best[0]):
            tree.sequence.fail(not_finite(self._graph, best[0]))
            tree.done = True
            return
        self.check_ids(ids, self._vocabulary)
        growth.expand(node, ids.tolist(), best)
        policy = tree.sequence.policy
        if growth.chain and policy is not None and policy.needs_confidence:
            tree.done = tree.done or not policy.keep_drafting(exp(best[0]))

    def _finished(self, tree: _Growing) -> TokenTree:
        if tree.sequence.error is not None:
            return TokenTree.chain(tree.sequence.tokens[-1:])
        try:
            return tree.growth.tree()
        except ValueError as error:  # a vocabulary of its own that names a token twice
            raise_if_foreign(error)
            raise BundleError(f"draft {self.name!r}: {error}; build the bundle again") from error

    # --- hidden states of the target ---

    def _keep(self, batch_index: int, hidden_states: View, nodes: Items[int]) -> None:
        """Let these of `hidden_states` [1, n, E] wait, in one copy where they lie one behind the other."""
        target, size = batch_index * self._slots + self._waiting[batch_index], self._size
        self._waiting[batch_index] += len(nodes)
        together = nodes[-1] - nodes[0] == len(nodes) - 1
        for first, count in [(nodes[0], len(nodes))] if together else [(node, 1) for node in nodes]:
            self._copy(
                target,
                hidden_states.buffer.view((count, size), self._dtype, hidden_states.offset + first * size),
            )
            target += count

    def _hidden_of(self, batch_index: int, count: int) -> View:
        return self._hidden_states.view(
            (count, self._size), self._dtype, batch_index * self._slots * self._size
        )

    def _copy(self, first: int, source: View) -> None:
        """Copy `source` [n, E] to those from `first` on that wait; where the buffers are."""
        if source.shape[0]:
            target = self._hidden_states.view(source.shape, self._dtype, first * self._size)
            self._engine.copy(target, source).run()


def _tokens(sequence: Sequence, positions: np.ndarray) -> list[int]:
    """Ids that follow these positions of the prompt and what was emitted behind it."""
    prompt, tokens = sequence.prompt_ids, sequence.tokens
    count = len(prompt)
    return [prompt[at] if at < count else tokens[at - count] for at in (positions + 1).tolist()]
