"""Medusa: heads on the target's last hidden state propose several tokens ahead at once (Cai et al., arXiv 2401.10774).

The target chose the pending token from the hidden state before it; head k reads that same one and proposes the k-th
token after the pending one. One run of the graph `medusa` per cycle and batch gives the best tokens of every head with
their log-probabilities; they make a chain, or a tree where the budget has room for branches: of the shape that was
measured at training (`tree` in the manifest), or else the likeliest paths by the heads' own probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Items
from math import exp, isfinite
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...common.errors import BundleError
from ...common.foreign_errors import raise_if_foreign
from ...decoder.device.draft_chain import DeviceChain, Sent
from ...decoder.logits import not_finite
from ...decoder.token_tree import TokenTree
from ...engines.base import DTYPES, Call, View
from ...engines.buffers import HostBuffer
from ...sampling.sampler import draw
from ...speculative.proposer import Proposer
from ...speedup.budget import Budget
from .medusa_options import MedusaOptions
from .static_tree import Parents, grow, within

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...decoder.device.draft_chain import Keep
    from ...sampling.draft_sampling import DraftSampling
    from ...sampling.verify import Verdict
    from ...speculative.sequence import Sequence


_Places = tuple[np.ndarray, np.ndarray]
"""Head and rank of every drafted node of a tree."""


def _shape(order: Parents, budget: Budget) -> tuple[TokenTree, _Places]:
    """The shape of a tree within a budget, with stand-ins for tokens, and what stands where in it."""
    parents, depths, ranks = within(order, budget)
    tree = TokenTree(range(-1, len(parents)), [-1, *(parent + 1 for parent in parents)])
    return tree, (np.array(depths, np.intp), np.array(ranks, np.intp))


class Medusa(Proposer):
    """The draft kind `medusa`. Keeps one hidden state per open sequence: the one that the pending token was chosen from.

    Raises `BundleError` for a draft without its graph. A sequence whose heads give no numbers ends with that error.
    """

    needs_prompt_hidden: ClassVar[bool] = True
    needs_hidden: ClassVar[bool] = True

    def __init__(self, draft: DraftInfo, decoder: Decoder):
        graph, options = draft.graphs.get("medusa"), draft.options
        if not isinstance(options, MedusaOptions) or graph is None:
            raise BundleError(f"manifest: draft {draft.name!r} has no graph of heads; build the bundle again")
        if options.heads is None or options.ranks is None:
            raise BundleError(f"manifest: draft {draft.name!r} has no graph of heads; build the bundle again")
        self.name, self._graph, self._tree = draft.name, graph, options.tree
        self.draft_graph = graph
        self._heads, self._ranks = options.heads, options.ranks
        self._vocabulary = decoder.manifest.text.vocab_size
        if self._tree:
            _, depths, ranks = within(self._tree, Budget(len(self._tree) + 1, len(self._tree)))
            if max(ranks) >= options.ranks or max(depths) >= options.heads:
                raise BundleError(
                    f"manifest: the tree of draft {draft.name!r} needs {max(depths) + 1} heads of {max(ranks) + 1} ranks, the "
                    f"draft has {options.heads} of {options.ranks}; build the bundle again"
                )
        self._engine, batch = decoder.engine, decoder.arena.max_batch
        self._size, self._dtype, self._batch = decoder.manifest.decoder.hidden_size, decoder.dtype, batch
        self._hidden_states = self._engine.allocate(
            f"{draft.name}.hidden_states", batch * self._size * DTYPES[self._dtype].itemsize, zeroed=True
        )
        self._index = HostBuffer(self._engine, f"{draft.name}.row_index", batch, "int64")
        num_proposals = batch * self._heads * self._ranks
        self._tokens = self._engine.allocate(
            f"{draft.name}.token_ids", num_proposals * DTYPES["int64"].itemsize
        )
        self._scores = self._engine.allocate(
            f"{draft.name}.log_probabilities", num_proposals * DTYPES["float32"].itemsize
        )
        self._shapes: dict[Budget, tuple[TokenTree, _Places]] = {}
        self._batch_indices: dict[Sequence, int] = {}
        self._free = list(range(batch))
        self._calls: dict[int, tuple[Call, View, View]] = {}

    @property
    def resumable(self) -> int:
        """Any slots: the last hidden state of a prompt is all that it reads, and that is always computed anew."""
        return sys.maxsize

    def on_hidden_states(self, sequence: Sequence, slot: int, hidden_states: View) -> None:
        """Keep the last hidden state of a chunk; that of the last chunk is the one the first token is chosen from."""
        if sequence not in self._batch_indices:
            self._batch_indices[sequence] = self._free.pop()
        self._keep(sequence, hidden_states, hidden_states.shape[1] - 1)

    def propose(self, sequences: Items[Sequence], budgets: Items[Budget]) -> list[TokenTree]:
        """Chains and trees of the heads' best tokens, no deeper than there are heads."""
        count = len(sequences)
        call, token_ids, log_probabilities = self._calls.get(count) or self._bind(count)
        self._index.host((count,))[:] = [self._batch_indices[sequence] for sequence in sequences]
        self._index.push((count,))
        call.run()
        scores, tokens = self._engine.read(log_probabilities), self._engine.read(token_ids)
        self.check_ids(tokens, self._vocabulary)
        trees = []
        for index, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
            mine = scores[index].tolist()
            # NaN or +inf anywhere in a head's logits makes the sum of its exponentials that, and all its values NaN.
            if all(isfinite(head[0]) for head in mine):
                if budget.nodes <= budget.depth:
                    budget = Budget.chain(_sure(sequence, mine[: budget.nodes]))
                if sequence.drawing is not None and budget.nodes <= budget.depth:
                    trees.append(
                        self._drawn(sequence, sequence.drawing, tokens[index], scores[index], budget.nodes)
                    )
                else:
                    trees.append(self._tree_of(sequence.tokens[-1], tokens[index], mine, budget))
                continue
            sequence.fail(not_finite(self._graph, mine[0][0]))
            trees.append(TokenTree.chain(sequence.tokens[-1:]))
        return trees

    def propose_on_device(self, sequence: Sequence, budget: Budget) -> DeviceChain | TokenTree:
        """A chain of the heads' best tokens; trees take shape on the host, and a threshold is asked there."""
        policy = sequence.policy
        if budget.nodes > budget.depth or (policy is not None and policy.needs_confidence):
            return super().propose_on_device(sequence, budget)
        count = min(budget.nodes, self._heads)
        index = np.array([self._batch_indices[sequence]], np.int64)

        def bind(sent: Mapping[str, View], keep: Keep) -> list[Call]:
            call, tokens, scores = self._bound(sent["row_index"])
            return [
                call,
                *(each for k in range(count) for each in keep(k, _best(tokens, k), _best(scores, k))),
            ]

        return DeviceChain((self._hidden_states.address, count), count, Sent({"row_index": index}, {}), bind)

    def advance(
        self, sequence: Sequence, tree: TokenTree, verdict: Verdict, hidden_states: View | None
    ) -> None:
        """Keep the hidden state of the last accepted node."""
        assert hidden_states is not None
        self._keep(sequence, hidden_states, verdict.path[-1] if verdict.path else 0)

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        place = self._batch_indices.pop(sequence, None)
        if place is not None:
            self._free.append(place)

    def _tree_of(
        self, pending: int, tokens: np.ndarray, scores: list[list[float]], budget: Budget
    ) -> TokenTree:
        """The tree of one sequence from ids and log-probabilities [heads, ranks]."""
        if budget.nodes <= budget.depth:
            return TokenTree.chain([pending, *tokens[: budget.nodes, 0].tolist()])
        if self._tree is None:
            shape, places = _shape(grow(scores, budget.nodes), budget)
        else:
            shape, places = self._shapes.get(budget) or self._shapes.setdefault(
                budget, _shape(self._tree, budget)
            )
        try:
            return shape.with_tokens([pending, *tokens[places].tolist()])
        except ValueError as error:  # a vocabulary of its own that names a token twice
            raise_if_foreign(error)
            raise BundleError(f"draft {self.name!r}: {error}; build the bundle again") from error

    def _drawn(
        self, sequence: Sequence, drawing: DraftSampling, tokens: np.ndarray, scores: np.ndarray, most: int
    ) -> TokenTree:
        """A chain with what it is drawn from: of head k the softmax over its ranks alone, after the request's
        temperature and the like. Any q is one; that of a head need not know what the heads before it drew."""
        sampling, chain, q = sequence.sampling, [sequence.tokens[-1]], []
        for depth, (ids, ranked) in enumerate(zip(tokens[:most], scores[:most], strict=True)):
            shares = sampling.probabilities(ranked)
            whole = np.zeros(self._vocabulary)
            np.add.at(whole, ids, shares)
            q.append(whole)
            rank = 0
            if drawing.draws:
                rank = draw(shares, sequence.proposing(depth))
            chain.append(int(ids[rank]))
        tree = TokenTree.chain(chain)
        if drawing.draws:
            tree.draft_probs = q
        else:
            tree.unused_draft_probs = q
        return tree

    def _keep(self, sequence: Sequence, hidden_states: View, index: int) -> None:
        """Copy entry `index` of `hidden_states` [1, n, E] to the sequence's place; where the buffers are."""
        size = self._size
        source = hidden_states.buffer.view((1, 1, size), self._dtype, hidden_states.offset + index * size)
        target = self._hidden_states.view((1, 1, size), self._dtype, self._batch_indices[sequence] * size)
        self._engine.copy(target, source).run()

    def _bind(self, count: int) -> tuple[Call, View, View]:
        result = self._calls[count] = self._bound(self._index.view((count,)))
        return result

    def _bound(self, index: View) -> tuple[Call, View, View]:
        """The heads on the kept hidden states at `index` [n], and where their best tokens and log-probabilities
        [n, heads, ranks] will be."""
        shape = (index.shape[0], self._heads, self._ranks)
        tokens, scores = self._tokens.view(shape, "int64"), self._scores.view(shape, "float32")
        inputs = {
            "hidden": self._hidden_states.view((self._batch, 1, self._size), self._dtype),
            "row_index": index,
        }
        call = self._engine.bind(self._graph, inputs, {"token_ids": tokens, "log_probabilities": scores})
        return call, tokens, scores


def _sure(sequence: Sequence, heads: list[list[float]]) -> int:
    """How many of these heads draft, by their log-probabilities [heads, ranks]: none behind one that is less sure of its
    best token than the policy asks for."""
    policy = sequence.policy
    if policy is not None and policy.needs_confidence:
        for head, ranked in enumerate(heads, 1):
            if not policy.keep_drafting(exp(ranked[0])):
                return head
    return len(heads)


def _best(ranked: View, head: int) -> View:
    """Of [1, heads, ranks] the first of a head, [1]."""
    return ranked.buffer.view((1,), ranked.dtype, ranked.offset + head * ranked.shape[2])
