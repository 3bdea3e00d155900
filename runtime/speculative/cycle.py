"""The speculative cycle: propose a tree, verify it in one pass, emit, make the accepted path valid.

One pass serves every sequence of the batch; each accepts its own number of tokens. State between cycles: every
emitted token of a sequence but the last is in the K/V of all layers; the last one is pending. Plain decoding is the
same loop with the empty tree. Corrected self-speculative cycle of FastVLM's algorithm 1: advance by accepted + 1
always, d + 1 exit states, crop all layers to the accepted path. In pseudo-code: docs/explanation/cycle-in-40-lines.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from math import nan
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decoder.decoder import Decoder
from ..decoder.logits import ArgmaxResult, TargetLogits, not_finite
from ..decoder.token_tree import TokenTree
from ..policy.base import allot_batch
from ..sampling.verify import Verdict, ranks
from ..speedup.budget import NOTHING, Budget
from .self_drafting import draft_on_trunk
from .sequence import FAILURES, Sequence

if TYPE_CHECKING:
    from ..policy.base import DraftPolicy
    from .proposer import Proposer

NOT_JUDGED = Verdict([], -1, 0)
"""Of a sequence that failed: it emits nothing."""


class Cycle:
    """The sequences that are decoded together, each in the place of the decoder's batch with its index."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.sequences: list[Sequence] = []
        # Who shares a policy, and who a proposer that does not draft on the trunk: known until someone comes or goes.
        self._policies: list[tuple[DraftPolicy, list[Sequence]]] = []
        self._proposers: list[tuple[Proposer, list[Sequence]]] = []
        self._watching: list[Proposer] = []

    def join(self, sequence: Sequence) -> None:
        """Take a sequence that was prefilled in the next free place, and whose first token was emitted."""
        sequence.batch_index = len(self.sequences)
        self.sequences.append(sequence)
        self._group()

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence go, finished or not; the last one takes its place."""
        batch_index, last = sequence.batch_index, self.sequences[-1]
        self.decoder.remove(batch_index)
        self.sequences[batch_index] = last
        last.batch_index = batch_index
        self.sequences.pop()
        self._group()

    def run(self) -> list[list[int]]:
        """One cycle: per sequence its tokens, accepted drafts first. At least one each, but none for a sequence whose
        numbers are not finite: that has its `error` then, and nothing is left of it in the caches."""
        decoder, sequences = self.decoder, self.sequences
        begin, busy = perf_counter(), decoder.engine.busy
        budgets = self._budgets()
        if self._stays_on_device(budgets):
            trees, logits = self._on_device(budgets[0])
            drafted, verified = begin, perf_counter()  # in one: counted as verification
        else:
            trees, cut = self._propose(budgets)
            drafted = perf_counter()
            if cut is None:
                decoder.full(*trees)
            elif len(trees) == 1:
                decoder.tail(cut, len(trees[0].tokens))
            else:
                decoder.tail(cut, decoder.exit_count, trees)
            verified = perf_counter()
            logits = decoder.head_of(trees)
        for proposer in self._watching:
            proposer.on_pass()
        verdicts: list[Verdict] = []
        paths: list[list[int]] = []
        first = 0
        for sequence, tree in zip(sequences, trees, strict=True):
            verdict = self._judge(sequence, tree, logits, first)
            verdicts.append(verdict)
            paths.append(verdict.path)
            first += len(tree.tokens)
        decoder.accept_all(trees, paths)
        emitted = list(map(self._tell, sequences, trees, verdicts))
        taken = (drafted - begin, verified - drafted, perf_counter() - verified)
        inside = decoder.engine.busy - busy
        for sequence in sequences:
            sequence.stats.seconds.add(*taken)
            sequence.stats.count_inside(inside)
        return emitted

    def _judge(
        self, sequence: Sequence, tree: TokenTree, logits: TargetLogits | ArgmaxResult, first: int
    ) -> Verdict:
        """The sequence's verdict. Numbers that are not finite show in its first logits already: what is masked is
        multiplied by zero, and 0 × NaN is NaN."""
        if sequence.error is None:
            try:
                return sequence.judge(tree, logits, first)
            except FAILURES as error:
                sequence.fail(error)
        return NOT_JUDGED

    def _group(self) -> None:
        policies: dict[int, tuple[DraftPolicy, list[Sequence]]] = {}
        proposers: dict[int, tuple[Proposer, list[Sequence]]] = {}
        for sequence in self.sequences:
            policy, proposer = sequence.policy, sequence.proposer
            if policy is not None and proposer is not None:
                policies.setdefault(id(policy), (policy, []))[1].append(sequence)
                if proposer.cut is None:
                    proposers.setdefault(id(proposer), (proposer, []))[1].append(sequence)
        self._policies, self._proposers = list(policies.values()), list(proposers.values())
        drafting = dict.fromkeys(sequence.proposer for sequence in self.sequences)
        self._watching = [each for each in drafting if each is not None and each.needs_passes]

    def _budgets(self) -> list[Budget]:
        """What the policies allot, within what each sequence may still emit and a pass may hold; chains where trees are not
        exact."""
        exact_trees = self.decoder.exact_trees
        budgets, widest = [NOTHING] * len(self.sequences), self.decoder.widest_tree - 1
        for policy, group in self._policies:
            for sequence, budget in zip(group, allot_batch(policy, group), strict=True):
                budget = budget.within(widest, sequence.left - 1)
                budgets[sequence.batch_index] = budget if exact_trees else Budget.chain(budget.depth)
        return budgets

    def _stays_on_device(self, budgets: Items[Budget]) -> bool:
        """Whether the host needs to see nothing but the outcome of the cycle."""
        if self.decoder.on_device is None or len(self.sequences) > 1:
            return False
        (sequence,) = self.sequences
        if sequence.error is not None or not sequence.takes_the_best:
            return False
        changes = sequence.changes
        if changes is not None and not self.decoder.on_device.offers(changes):
            return False
        proposer, policy = sequence.proposer, sequence.policy
        asks = policy is not None and policy.needs_confidence
        if not budgets[0].nodes or proposer is None:
            return True
        if proposer.cut is None and not proposer.drafts_on_device:
            return True  # it knows itself what the host must see
        return proposer.drafts_on_device and not asks

    def _on_device(self, budget: Budget) -> tuple[list[TokenTree], ArgmaxResult]:
        """A cycle of the only sequence: its tree, and what the target says of it."""
        decoder, (sequence,) = self.decoder, self.sequences
        proposer, device = sequence.proposer, decoder.on_device
        assert device is not None
        decoder.begin_cycle(1 + budget.nodes)
        start, pending, changes = decoder.arena.lengths[0], sequence.tokens[-1], sequence.changes
        if not budget.nodes or proposer is None:
            result = device.verify(TokenTree.chain([pending]), start, changes)
        elif proposer.cut is not None:
            result = device.draft(proposer, proposer.cut, budget.depth, pending, start, changes)
        elif proposer.drafts_on_device:
            result = device.draft_apart(proposer, proposer.pass_apart, budget.depth, pending, start, changes)
        elif isinstance(proposal := proposer.propose_on_device(sequence, budget), TokenTree):
            self._check(sequence, budget, proposal)
            result = device.verify(proposal, start, changes)
        else:
            result = device.verify_drafted(proposal, pending, start, changes)
            proposer.check_ids(np.asarray(result.tree.tokens), decoder.embedding.vocabulary)
        if not result.finite:
            assert proposer is not None
            sequence.fail(not_finite(proposer.draft_graph, nan))
        return [result.tree], result.answers

    def _propose(self, budgets: Items[Budget]) -> tuple[list[TokenTree], int | None]:
        """Begin a cycle: a tree for every sequence, and the cut where their exit states lie if any was drafted on the
        trunk."""
        decoder, sequences = self.decoder, self.sequences
        if not self._policies:  # nobody drafts
            decoder.begin_cycle(1)
            return [TokenTree.chain(sequence.tokens[-1:]) for sequence in sequences], None
        trees: list[Any] = []
        most = 0
        for sequence, budget in zip(sequences, budgets, strict=True):
            most = max(most, budget.nodes)
            trees.append(None if budget.nodes else TokenTree.chain(sequence.tokens[-1:]))
        decoder.begin_cycle(1 + most)
        for proposer, group in self._proposers:
            drafting = [sequence for sequence in group if budgets[sequence.batch_index].nodes]
            given = [budgets[sequence.batch_index] for sequence in drafting]
            proposed = proposer.propose(drafting, given) if drafting else []
            for sequence, budget, tree in zip(drafting, given, proposed, strict=True):
                if sequence.grammar is not None:
                    tree = sequence.grammar.fit(tree, budget)
                self._check(sequence, budget, tree)
                trees[sequence.batch_index] = tree
        cut = draft_on_trunk(decoder, sequences, budgets, trees) if None in trees else None
        return trees, cut

    def _check(self, sequence: Sequence, budget: Budget, tree: TokenTree) -> None:
        assert tree.tokens[0] == sequence.tokens[-1], "not a tree of the pending token"
        assert tree.proposed <= budget.nodes and tree.depth <= budget.depth, "more than the budget"
        vocabulary = self.decoder.embedding.vocabulary
        assert all(0 <= token < vocabulary for token in tree.tokens), "proposed ids outside the vocabulary"

    def _tell(self, sequence: Sequence, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Count, and let the policy and the proposer know; returns what the sequence emits."""
        if sequence.error is not None:
            self.decoder.clear(sequence.batch_index)
            return []
        path, token, evaluated = verdict
        proposed, proposer = len(tree.tokens) - 1, sequence.proposer
        if tree.is_chain:
            sequence.stats.count(proposed, len(path), evaluated)
        else:
            sequence.stats.count(proposed, len(path), evaluated, tree.depth)
            sequence.stats.count_ranks(ranks(tree, path))
        if sequence.policy is not None:
            sequence.policy.observe(sequence, proposed, verdict)
        if proposer is not None:
            hidden_states = None
            if proposer.needs_hidden:
                hidden_states = self.decoder.verified_hidden(sequence.batch_index, len(tree.tokens))
            proposer.advance(sequence, tree, verdict, hidden_states)
        tokens = [tree.tokens[node] for node in path]
        tokens.append(token)
        return tokens
