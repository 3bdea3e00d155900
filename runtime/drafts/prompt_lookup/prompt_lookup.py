"""Prompt lookup: proposes what followed the last tokens where they stood in the prompt or the output before.

No network, no training, no graph: it runs on the host, and every bundle has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...decoder.token_tree import TokenTree
from ...speculative.proposer import Proposer
from ...speedup.budget import Budget
from .ngram_index import NgramIndex

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.sequence import Sequence

LONGEST, SHORTEST = 3, 1
"""N-gram lengths. With these, four tokens a cycle gave tau 1.35 on 320 chat answers of SmolLM2."""


class PromptLookup(Proposer):
    """The draft kind `prompt-lookup`. One index per open sequence; proposals depend on its tokens alone."""

    def __init__(self, draft: DraftInfo, decoder: Decoder, longest: int = LONGEST, shortest: int = SHORTEST):
        self.name = draft.name
        self._vocab_size, self._lengths = decoder.manifest.text.vocab_size, (longest, shortest)
        self._open: dict[Sequence, tuple[NgramIndex, int]] = {}

    def begin(self, sequence: Sequence) -> None:
        """Index the prompt; `sequence.barred` ids, its image placeholders, are never proposed."""
        index = NgramIndex(
            *self._lengths,
            barred=sequence.barred,
            ends=sequence.limits.eos_token_ids,
            vocab_size=self._vocab_size,
        )
        index.extend(int(token) for token in sequence.prompt_ids)
        self._open[sequence] = index, len(index)

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        """What followed before, below the pending token: a chain, or a tree when the budget has room for branches."""
        index = self._read(sequence)
        if budget.empty:
            return TokenTree.chain(sequence.tokens[-1:])
        tokens, parents = index.tree(budget)
        root = sequence.tokens[-1]
        if budget.nodes <= budget.depth:
            return TokenTree.chain([root, *tokens])
        return TokenTree([root, *tokens], [-1, *(parent + 1 for parent in parents)])

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._open.pop(sequence, None)

    def _read(self, sequence: Sequence) -> NgramIndex:
        """What has been emitted is read when something is asked: cycles that draft nothing cost nothing."""
        index, prompt = self._open[sequence]
        index.extend(sequence.tokens[len(index) - prompt :])
        return index
