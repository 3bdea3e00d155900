"""Prompt lookup or a memory first, else another draft: where the last tokens stood before, what followed them costs nothing
and is often right; where they are new, a trained draft may know better than nothing."""

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


FADE = 1 / 8
"""Weight of the latest proposal in what proposals of its kind are expected to bring."""
BACK = 1 / 50
"""How far an expectation goes back with each cycle in which the other was asked: to where it began, or to ENOUGH times what
the other brings if that is less. So it is tried again, a long match no sooner."""
ENOUGH = 1.1
SECOND_GAIN = 1.5
"""Accepted tokens that are expected of the second draft before it was asked."""


class Expectations:
    """Accepted tokens that a proposal brings, by how many tokens its source matched; of the second draft under None. A match
    of n tokens is first taken to bring n, and a guess without one to bring one. From what was accepted alone, never from the
    clock."""

    def __init__(self) -> None:
        self._gains: dict[int | None, float] = {None: SECOND_GAIN}

    def prefers_first(self, matched: int) -> bool:
        """Whether a match of so many tokens is expected to bring as much as the second draft."""
        matched = max(1, matched)
        gain = self._gains.setdefault(matched, float(matched))
        second = self._gains[None]
        if gain >= second:
            return True
        self._gains[matched] = gain + BACK * (min(matched, ENOUGH * second) - gain)
        return False

    def note(self, matched: int | None, accepted: int) -> None:
        """What a proposal brought."""
        matched = None if matched is None else max(1, matched)
        before = self._gains.get(matched, float(matched or 0))
        self._gains[matched] = before + FADE * (accepted - before)


class FallbackProposer(Proposer):
    """Proposes what `first` does, and for sequences of which that knows nothing what `second` does. Where `first` says how
    much it matched, it is asked only if that has brought as much as `second` (`Expectations`). Both are told everything;
    neither drafts on the target's own layers."""

    def __init__(self, name: str, first: Proposer, second: Proposer):
        assert first.cut is None and second.cut is None, "drafts on the trunk have cycles of their own"
        self.name, self._first, self._second = name, first, second
        self._both = first, second
        self._expected = Expectations()
        self._asked: dict[Sequence, int | None] = {}
        """What proposed in this cycle: the first draft with so many tokens matched, or the second."""
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
        new = [index for index, tree in enumerate(trees) if not self._trusts(tree, sequences[index])]
        if new:
            second = self._second.propose(
                [sequences[index] for index in new], [budgets[index] for index in new]
            )
            for index, tree in zip(new, second, strict=True):
                trees[index] = tree
        return trees

    def propose_on_device(self, sequence: Sequence, budget: Budget) -> DeviceChain | TokenTree:
        tree = self._first.propose_on_device(sequence, budget)
        if isinstance(tree, TokenTree) and not self._trusts(tree, sequence):
            return self._second.propose_on_device(sequence, budget)
        return tree

    def _trusts(self, tree: TokenTree, sequence: Sequence) -> bool:
        """Whether the proposal of `first` stands."""
        matched = self._first.matched(sequence)
        if matched is None:
            return tree.proposed > 0
        trusted = tree.proposed > 0 and self._expected.prefers_first(matched)
        self._asked[sequence] = matched if trusted else None
        return trusted

    def advance(
        self, sequence: Sequence, tree: TokenTree, verdict: Verdict, hidden_states: View | None
    ) -> None:
        if sequence in self._asked:
            asked = self._asked.pop(sequence)
            if tree.proposed:
                self._expected.note(asked, len(verdict.path))
        for each in self._both:
            each.advance(sequence, tree, verdict, hidden_states if each.needs_hidden else None)

    def end(self, sequence: Sequence) -> None:
        self._asked.pop(sequence, None)
        for each in self._both:
            each.end(sequence)
