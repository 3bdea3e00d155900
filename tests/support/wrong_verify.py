"""Wrong ways to verify a tree, for the mutants of every room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.sampling.verify import Verdict

Verify: TypeAlias = "Callable[[TokenTree, Callable[[int, int], int]], Verdict]"


def padded_with_0(verify: Verify) -> Verify:
    """Short paths are padded with token 0: the target's own token 0 then looks like an accepted proposal."""

    def wrong(tree: TokenTree, choose: Callable[[int, int], int]) -> Verdict:
        verdict = verify(tree, choose)
        if verdict.token != 0 or len(verdict.path) >= max(tree.depths):
            return verdict
        last = len(tree) - 1  # index −1 of the logits
        return Verdict([*verdict.path, last], choose(last, len(verdict.path) + 1), verdict.evaluated + 1)

    return wrong
