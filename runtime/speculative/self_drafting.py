"""Drafting on the target's own trunk: token after token, for all sequences of a batch in step.

The K/V that drafting writes and the exit states it saves are the ones verification uses (LayerSkip, arXiv 2404.16710;
imitation network: FastVLM, arXiv 2510.22641, with its loop corrected). Sequences that draft otherwise, or not at all,
pass the trunk beside the others with the tokens of their trees, so that one tail verifies the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from ..decoder.token_tree import TokenTree
from ..speedup.budget import Budget
from .early_stop import ending
from .sequence import FAILURES, Sequence

if TYPE_CHECKING:
    from ..decoder.decoder import Decoder
    from ..decoder.logits import TargetLogits


class TrunkProposer(Protocol):
    """A proposer with a `cut`: what follows the trunk's hidden states of a step."""

    @property
    def cut(self) -> int | None: ...

    def step_logits(self, step: int) -> TargetLogits:
        """Draft logits after the exit states of `step`; entry b is of sequence b."""
        ...

    def choose(self, sequence: Sequence, logits: TargetLogits, logits_index: int, after: list[int]) -> int:
        """The token to draft after the emitted tokens and `after`, which is the caller's and grows."""
        ...

    def passed(self, step: int) -> None:
        """The exit states of `step` are there, and nothing is drafted behind them."""
        ...


def draft_on_trunk(
    decoder: Decoder, sequences: Items[Sequence], budgets: Items[Budget], trees: list[TokenTree | None]
) -> int:
    """Fill in the missing `trees` (chains) and leave the exit states of every node; returns the cut they lie at.

    Beyond a sequence's own nodes its last token is repeated: that is scratch. A sequence whose draft is not finite
    fails, and passes on with what it drafted until then.
    """
    if len(sequences) == 1:
        only: TrunkProposer = sequences[0].proposer  # type: ignore[assignment]
        cut = only.cut or 0
        trees[0] = _one(decoder, sequences[0], only, budgets[0], cut)
        return cut
    missing = [i for i, tree in enumerate(trees) if tree is None]
    proposers: dict[int, TrunkProposer] = {i: sequences[i].proposer for i in missing}  # type: ignore[misc]
    cut = max(proposer.cut or 0 for proposer in proposers.values())
    others = any(tree is not None and not tree.is_chain for tree in trees)
    chains = {i: [sequences[i].tokens[-1]] for i in missing}
    endings = {i: ending(sequences[i]) for i in missing}
    drafting, steps = set(missing), max([1, *(len(tree) for tree in trees if tree is not None)])
    step = 0
    while drafting or step < steps:
        tokens = []
        for batch_index, tree in enumerate(trees):
            known = chains[batch_index] if tree is None else tree.tokens
            tokens.append(known[min(step, len(known) - 1)])
        fed = [tree or TokenTree.chain(chains[i]) for i, tree in enumerate(trees)] if others else None
        decoder.trunk(cut, tokens, fed)
        proposing = {proposers[i] for i in drafting}
        for proposer in {proposers[i] for i, chain in chains.items() if len(chain) > step} - proposing:
            proposer.passed(step)
        for proposer in proposing:
            logits = proposer.step_logits(step)
            for batch_index in [i for i in drafting if proposers[i] is proposer]:
                sequence, chain = sequences[batch_index], chains[batch_index]
                try:
                    token = proposer.choose(sequence, logits, batch_index, chain[1:])
                except FAILURES as error:
                    sequence.end_draft(error)
                    drafting.discard(batch_index)
                    continue
                chain.append(token)
                is_long = len(chain) > budgets[batch_index].depth
                if is_long or endings[batch_index](logits, batch_index, token):
                    drafting.discard(batch_index)
                    steps = max(steps, len(chain))  # the last draft passes the trunk too
        step += 1
    for batch_index, chain in chains.items():
        trees[batch_index] = sequences[batch_index].drafted(chain)
    return cut


def _one(
    decoder: Decoder, sequence: Sequence, proposer: TrunkProposer, budget: Budget, cut: int
) -> TokenTree:
    """`draft_on_trunk` for a single sequence, without its bookkeeping."""
    tokens, drafted = sequence.tokens[-1:], []
    pending, ends = tokens[0], ending(sequence)
    for step in range(budget.depth):
        decoder.trunk(cut, tokens)
        logits = proposer.step_logits(step)
        try:
            token = proposer.choose(sequence, logits, 0, drafted)
        except FAILURES as error:
            sequence.end_draft(error)
            return sequence.drafted([pending, *drafted])  # all of it has passed
        drafted.append(token)
        tokens = [token]
        if ends(logits, 0, token):
            break
    decoder.trunk(cut, tokens)  # the last draft passes the trunk too: d + 1 exit states
    proposer.passed(len(drafted))
    return sequence.drafted([pending, *drafted])
