"""Prompt lookup first, else another draft: where the last tokens stood before, what followed them costs nothing and is
often right; where they are new, a trained draft may know better than nothing."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from ..decoder.token_tree import TokenTree
from ..speculative.proposer import Picture, Proposer
from ..speedup.budget import Budget

if TYPE_CHECKING:
    from ..decoder.device.draft_chain import DeviceChain
    from ..engines.base import View
    from ..sampling.verify import Verdict
    from ..speculative.sequence import Sequence


class FallbackProposer(Proposer):
    """Proposes what `first` does, and for sequences of which that knows nothing what `second` does. Both are told
    everything; neither drafts on the target's own layers."""

    def __init__(self, name: str, first: Proposer, second: Proposer):
        assert first.cut is None and second.cut is None, "drafts on the trunk have cycles of their own"
        self.name, self._first, self._second = name, first, second
        self._both = first, second
        self.draft_graph = second.draft_graph

    @property
    def needs_prompt_hidden(self) -> bool:  # type: ignore[override]
        return any(each.needs_prompt_hidden for each in self._both)

    @property
    def needs_pictures(self) -> bool:  # type: ignore[override]
        return any(each.needs_pictures for each in self._both)

    @property
    def needs_hidden(self) -> bool:  # type: ignore[override]
        return any(each.needs_hidden for each in self._both)

    @property
    def resumable(self) -> int:
        return min(each.resumable for each in self._both)

    def resume(self, length: int) -> None:
        for each in self._both:
            each.resume(length)

    def begin(self, sequence: Sequence) -> None:
        for each in self._both:
            each.begin(sequence)

    def on_pictures(self, sequence: Sequence, pictures: Items[Picture]) -> None:
        for each in self._both:
            if each.needs_pictures:
                each.on_pictures(sequence, pictures)

    def on_hidden_states(self, sequence: Sequence, slot: int, hidden_states: View) -> None:
        for each in self._both:
            if each.needs_prompt_hidden:
                each.on_hidden_states(sequence, slot, hidden_states)

    def propose(self, sequences: Items[Sequence], budgets: Items[Budget]) -> list[TokenTree]:
        """One call of `second` for all sequences that are new to `first`, none where there are none."""
        trees = self._first.propose(sequences, budgets)
        new = [index for index, tree in enumerate(trees) if not tree.proposed]
        if new:
            second = self._second.propose(
                [sequences[index] for index in new], [budgets[index] for index in new]
            )
            for index, tree in zip(new, second, strict=True):
                trees[index] = tree
        return trees

    def propose_on_device(self, sequence: Sequence, budget: Budget) -> DeviceChain | TokenTree:
        tree = self._first.propose_on_device(sequence, budget)
        if isinstance(tree, TokenTree) and not tree.proposed:
            return self._second.propose_on_device(sequence, budget)
        return tree

    def advance(
        self, sequence: Sequence, tree: TokenTree, verdict: Verdict, hidden_states: View | None
    ) -> None:
        for each in self._both:
            each.advance(sequence, tree, verdict, hidden_states if each.needs_hidden else None)

    def end(self, sequence: Sequence) -> None:
        for each in self._both:
            each.end(sequence)
