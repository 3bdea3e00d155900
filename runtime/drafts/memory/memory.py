"""The draft kind `memory`: proposes how earlier answers went on. No network, no training, no graph; every bundle has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...decoder.token_tree import TokenTree
from ...speculative.proposer import Proposer
from ...speedup.budget import Budget
from .answers import Corpus
from .recall import Recall

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.sequence import Sequence

NOTHING = Corpus.of([])


class MemoryProposer(Proposer):
    """Proposals depend on the memory as it was when the request was prefilled, and on the request's tokens. A request
    without a memory gets none."""

    def __init__(self, draft: DraftInfo, decoder: Decoder, shortest: int = 1) -> None:
        self.name = draft.name
        self._vocab_size, self._shortest = decoder.manifest.text.vocab_size, shortest
        self._open: dict[Sequence, Recall] = {}

    def begin(self, sequence: Sequence) -> None:
        """Take what is remembered now."""
        corpus = NOTHING if sequence.memory is None else sequence.memory.corpus()
        self._open[sequence] = Recall(
            corpus,
            self._shortest,
            barred=sequence.barred,
            ends=sequence.limits.eos_token_ids,
            vocab_size=self._vocab_size,
        )

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        """How the answers went on: a chain, or a tree where the budget has room for branches."""
        recall = self._read(sequence)
        root = sequence.tokens[-1]
        if budget.empty:
            return TokenTree.chain([root])
        tokens, parents = recall.tree(budget)
        if budget.nodes <= budget.depth:
            return TokenTree.chain([root, *tokens])
        return TokenTree([root, *tokens], [-1, *(parent + 1 for parent in parents)])

    def matched(self, sequence: Sequence) -> int | None:
        return self._read(sequence).longest

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._open.pop(sequence, None)

    def _read(self, sequence: Sequence) -> Recall:
        """What has been emitted is read when something is asked: cycles that draft nothing cost nothing."""
        recall = self._open[sequence]
        for token in sequence.tokens[len(recall) :]:
            recall.push(token)
        return recall
