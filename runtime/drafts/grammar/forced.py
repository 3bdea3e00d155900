"""Forced tokens as a draft. Several spellings of the same bytes may be allowed, so they are verified like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...decoder.token_tree import TokenTree
from ...speculative.proposer import Proposer
from ...speedup.budget import Budget

if TYPE_CHECKING:
    from ...speculative.sequence import Sequence


class ForcedTokens(Proposer):
    """A request without a grammar gets no proposals."""

    def __init__(self, name: str) -> None:
        self.name = name

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        """What must follow now; nothing where there is a choice."""
        grammar = sequence.grammar
        tokens = [] if grammar is None else grammar.forced((), budget.depth)
        return TokenTree.chain([sequence.tokens[-1], *tokens])
