"""A draft that is as wrong as it can be: output must not change (`verify`, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..decoder.logits import TargetLogits
from ..decoder.token_tree import TokenTree
from ..sampling.verify import Verdict
from ..speculative.proposer import Picture, Proposer
from ..speculative.sequence import Sequence
from ..speedup.budget import Budget

if TYPE_CHECKING:
    from ..session.session import Session


class AdversarialProposer(Proposer):
    """Any proposer with its choices turned round: on the trunk the least likely token, elsewhere another id."""

    def __init__(self, inner: Any, vocabulary: int):
        self.name, self._inner, self._vocabulary = f"wrong {inner.name}", inner, vocabulary

    @property
    def cut(self) -> int | None:
        return self._inner.cut

    def step_logits(self, step: int) -> TargetLogits:
        """As the inner proposer's."""
        return self._inner.step_logits(step)

    def choose(self, sequence: Sequence, logits: TargetLogits, logits_index: int, after: list[int]) -> int:
        """The least likely token."""
        return int(logits.logits(logits_index).argmin())

    @property
    def needs_prompt_hidden(self) -> bool:  # type: ignore[override]
        return self._inner.needs_prompt_hidden

    @property
    def needs_hidden(self) -> bool:  # type: ignore[override]
        return self._inner.needs_hidden

    @property
    def resumable(self) -> int:
        return self._inner.resumable

    def resume(self, length: int) -> None:
        self._inner.resume(length)

    @property
    def needs_pictures(self) -> bool:  # type: ignore[override]
        return self._inner.needs_pictures

    def on_pictures(self, sequence: Sequence, pictures: Items[Picture]) -> None:
        self._inner.on_pictures(sequence, pictures)

    def on_hidden_states(self, sequence: Sequence, slot: int, hidden_states: Any) -> None:
        self._inner.on_hidden_states(sequence, slot, hidden_states)

    def passed(self, step: int) -> None:
        self._inner.passed(step)

    @property
    def needs_passes(self) -> bool:  # type: ignore[override]
        return self._inner.needs_passes

    def on_pass(self) -> None:
        self._inner.on_pass()

    def begin(self, sequence: Sequence) -> None:
        self._inner.begin(sequence)

    def propose(self, sequences: Items[Sequence], budgets: Items[Budget]) -> list[TokenTree]:
        trees = self._inner.propose(sequences, budgets)
        return [
            TokenTree(
                [tree.tokens[0], *((token + 1) % self._vocabulary for token in tree.tokens[1:])], tree.parents
            )
            for tree in trees
        ]

    def advance(self, sequence: Sequence, tree: TokenTree, verdict: Verdict, hidden_states: Any) -> None:
        self._inner.advance(sequence, tree, verdict, hidden_states)

    def end(self, sequence: Sequence) -> None:
        self._inner.end(sequence)


@contextmanager
def always_wrong(session: Session, draft: str) -> Iterator[None]:
    """While active, `draft` of `session` proposes wrong tokens."""
    proposer = session.proposer(draft)
    session.replace_proposer(draft, AdversarialProposer(proposer, session.bundle.manifest.text.vocab_size))
    try:
        yield
    finally:
        session.replace_proposer(draft, proposer)
