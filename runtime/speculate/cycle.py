"""The speculative cycle: propose a tree, verify it in one pass, emit, make the accepted path valid.

One pass serves every sequence of the batch; each accepts its own number of tokens. State between cycles: every
emitted token of a sequence but the last is in the K/V of all layers; the last one is pending. Plain decoding is the
same loop with the empty tree. Corrected self-speculative cycle of FastVLM's algorithm 1: advance by accepted + 1
always, d + 1 exit rows, crop all layers to the accepted path.
"""

from __future__ import annotations

import time
from typing import cast

from ..decode.passes import Decoder
from ..decode.tree import TokenTree
from .acceptance import Verdict
from .budget import NOTHING, Budget
from .on_trunk import draft_on_trunk
from .sequence import Sequence


class Cycle:
    """The sequences that are decoded together, each in the place of the decoder's batch with its index."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.sequences: list[Sequence] = []

    def join(self, sequence: Sequence) -> None:
        """Take a sequence that was prefilled in the next free place, and whose first token was emitted."""
        sequence.row = len(self.sequences)
        self.sequences.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence go, finished or not; the last one takes its place."""
        row, last = sequence.row, self.sequences[-1]
        self.decoder.remove(row)
        self.sequences[row] = last
        last.row = row
        self.sequences.pop()

    def run(self) -> list[list[int]]:
        """One cycle: per sequence its tokens, accepted drafts first. At least one each."""
        decoder, sequences = self.decoder, self.sequences
        begin = time.perf_counter()
        cut: int | None = None
        if any(sequence.proposer is not None for sequence in sequences):
            budgets = self._budgets()
            decoder.begin_cycle(1 + max(budget.nodes for budget in budgets))
            trees, cut = self._propose(budgets)
        else:  # plain decoding asks nobody
            decoder.begin_cycle(1)
            trees = [TokenTree.chain(sequence.tokens[-1:]) for sequence in sequences]
        drafted = time.perf_counter()
        if cut is None:
            decoder.full(*trees)
        elif len(trees) == 1:
            decoder.tail(cut, len(trees[0]))
        else:
            decoder.tail(cut, decoder.exit_count, trees)
        verified = time.perf_counter()
        rows = decoder.head_of(trees)
        verdicts, first = [], 0
        for sequence, tree in zip(sequences, trees, strict=True):
            verdicts.append(sequence.judge(tree, rows, first))
            first += len(tree)
        decoder.accept_all(trees, [verdict.path for verdict in verdicts])
        emitted = [self._tell(*each) for each in zip(sequences, trees, verdicts, strict=True)]
        end = time.perf_counter()
        for sequence in sequences:
            seconds = sequence.stats.seconds
            seconds.draft += drafted - begin
            seconds.verify += verified - drafted
            seconds.head += end - verified
        return emitted

    def _budgets(self) -> list[Budget]:
        """What the policies allot, within what each sequence may still emit and a pass may hold."""
        sequences, widest = self.sequences, self.decoder.max_width - 1
        budgets = [NOTHING] * len(sequences)
        groups: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.policy is not None and sequence.proposer is not None:
                groups.setdefault(id(sequence.policy), []).append(sequence)
        for group in groups.values():
            policy = group[0].policy
            assert policy is not None
            for sequence, budget in zip(group, policy.allot(group), strict=True):
                budgets[sequence.row] = budget.within(widest, sequence.left - 1)
        return budgets

    def _propose(self, budgets: list[Budget]) -> tuple[list[TokenTree], int | None]:
        """A tree for every sequence, and the cut where their exit rows lie if any was drafted on the trunk."""
        trees: list[TokenTree | None] = [None] * len(budgets)
        groups: dict[int, list[Sequence]] = {}
        on_trunk = False
        for sequence, budget in zip(self.sequences, budgets, strict=True):
            if budget.depth == 0 or sequence.proposer is None:
                trees[sequence.row] = TokenTree.chain(sequence.tokens[-1:])
            elif sequence.proposer.cut is None:
                groups.setdefault(id(sequence.proposer), []).append(sequence)
            else:
                on_trunk = True
        for group in groups.values():
            proposer = group[0].proposer
            assert proposer is not None
            given = [budgets[sequence.row] for sequence in group]
            for sequence, budget, tree in zip(group, given, proposer.propose(group, given), strict=True):
                self._check(sequence, budget, tree)
                trees[sequence.row] = tree
        cut = draft_on_trunk(self.decoder, self.sequences, budgets, trees) if on_trunk else None
        return cast("list[TokenTree]", trees), cut

    def _check(self, sequence: Sequence, budget: Budget, tree: TokenTree) -> None:
        assert tree.tokens[0] == sequence.tokens[-1], "not a tree of the pending token"
        assert tree.proposed <= budget.nodes and max(tree.depths) <= budget.depth, "more than the budget"
        vocabulary = self.decoder.embedding.vocabulary
        assert all(0 <= token < vocabulary for token in tree.tokens), "proposed ids outside the vocabulary"

    def _tell(self, sequence: Sequence, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Count, and let the policy and the proposer know; returns what the sequence emits."""
        sequence.stats.count(tree.proposed, len(verdict.path), verdict.evaluated, max(tree.depths))
        if sequence.policy is not None:
            sequence.policy.observe(sequence, tree.proposed, verdict)
        proposer = sequence.proposer
        if proposer is not None:
            rows = None
            if proposer.needs_rows:
                rows = self.decoder.verified_rows(sequence.row, [0, *verdict.path])
            proposer.advance(sequence, tree, verdict, rows)
        return [*(tree.tokens[node] for node in verdict.path), verdict.token]
