"""Ways of accepting that look right and are not: what checks a law must see them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.sampling import sampler
from vlmexport.runtime.sampling.typical import Typical
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speculative import cycle, sequence
from vlmexport.runtime.speculative.sequence import Sequence as Request
from vlmexport.runtime.speedup.budget import Budget

from tests.support.toy_drafts import DRAFTS, Case, Likeliest
from tests.support.wrong_verify import padded_with_0


class SoftmaxOfArgmax(Likeliest):
    """The best token, handed over with the distribution that it was not drawn from."""

    def propose_one(self, sequence: Request, budget: Budget) -> TokenTree:
        tree = TokenTree.chain(super().propose_one(sequence, Budget.chain(budget.depth)).tokens)
        prefixes = [
            [*sequence.prompt_ids, *sequence.tokens, *tree.tokens[1 : at + 1]] for at in range(tree.proposed)
        ]
        tree.draft_probs = [sequence.sampling.probabilities(self.law(prefix)) for prefix in prefixes]
        return tree


def softmax_of_an_argmax(patch: pytest.MonkeyPatch) -> Case:
    return Case(lambda decoder, law: SoftmaxOfArgmax(law), lambda: FixedLength(2))


def longest_of_several_samples(patch: pytest.MonkeyPatch) -> Case:
    """Every path of the tree has draws of its own, and the longest that is followed wins (Medusa's nucleus mode)."""

    def judge(self: Request, tree: TokenTree, rows, first: int) -> Verdict:
        fresh = itertools.count(0xF0)

        def choose(node: int, after: list[int]) -> int:
            p = self.distribution(rows, first + node, after)
            return sampler.draw(p, self.sampling.uniform(len(self.tokens), next(fresh)))

        found = [Verdict([], choose(0, []), 0)]
        for leaf in [node for node in range(1, len(tree)) if not tree.children[node]]:
            path = np.flatnonzero(tree.ancestors[leaf])[1:].tolist()
            drawn = [choose(node, [tree.tokens[n] for n in path[:at]]) for at, node in enumerate([0, *path])]
            followed = next((at for at, node in enumerate(path) if drawn[at] != tree.tokens[node]), len(path))
            found.append(Verdict(path[:followed], drawn[followed], followed))
        return max(found, key=lambda verdict: len(verdict.path))

    patch.setattr(Request, "judge", judge)
    return DRAFTS["tree"]


def pad_id_0(patch: pytest.MonkeyPatch) -> Case:
    """Short paths are padded with token 0: the target's own token 0 then looks like an accepted proposal."""
    patch.setattr(sequence, "verify_draws", padded_with_0(sequence.verify_draws))
    patch.setattr(cycle, "ranks", lambda tree, path: [])  # counting them would notice first
    return DRAFTS["tree"]


def siblings_in_another_order(patch: pytest.MonkeyPatch) -> Case:
    """The children of a node are found under one another's tokens."""
    children = TokenTree.children.func  # type: ignore[attr-defined]

    def wrong(self: TokenTree) -> list[dict[int, int]]:
        return [dict(zip(found, reversed(found.values()), strict=True)) for found in children(self)]

    patch.setattr(TokenTree, "children", property(wrong))
    return DRAFTS["tree"]


def typical(patch: pytest.MonkeyPatch) -> Case:
    """Not an error, but not the law either."""
    case = DRAFTS["tree"]
    return Case(case.proposer, case.policy, lambda: {"typical": Typical()})


def left_over_uniforms(patch: pytest.MonkeyPatch) -> Case:
    """A proposal that is drawn again at the same place is drawn with the same uniform, on which depended how much is
    drafted now."""
    patch.setattr(
        Request,
        "proposing",
        lambda self, depth: self.sampling.uniform(len(self.tokens) + depth, sampler.PROPOSING),
    )
    return DRAFTS["on-trunk, drawn, confident"]


NAMED = [softmax_of_an_argmax, longest_of_several_samples, pad_id_0, siblings_in_another_order]
"""Errors that others have made; each is large enough to show in a few thousand draws."""

MUTANTS = [*NAMED, left_over_uniforms, typical]
