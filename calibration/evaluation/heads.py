"""Acceptance of Medusa heads on held-out data: what chains of their best tokens would reach.

Heads read the row that the pending token was chosen from, whatever was drafted before, so on text that the target wrote
greedily a teacher-forced pass knows every cycle. The row that chose an answer's first token is not among the rows of a
text: its first cycle counts as one that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...runtime.speedup.stats import Stats
from ..objectives.losses import overlap
from ..targets.teacher_forcing import Rows
from .acceptance import Counted, chain_cycles


def head_cycles(hits: Sequence[Sequence[bool]], draft_length: int, ended: bool = True) -> Stats:
    """Replays chains of heads over one answer, as the runtime counts them.

    Args:
        hits: [n][heads]; row r chose the (r + 1)-th token after the first, and head k + 1 is right there or not.
        draft_length: d; heads propose no more than they are.
        ended: the last token is an end token; otherwise the limit cut the answer (see `greedy_cycles`).
    """
    return chain_cycles([[], *hits][: len(hits)], draft_length, ended)


class HeadCount(Counted):
    """Collects the acceptance of heads; `agreement` and `overlap` are of head 1."""

    def add(self, best: Tensor, expected: Tensor, first: Tensor, target: Tensor, batch: Rows) -> None:
        """`best` int64 [N, heads, ranks], `expected` int64 [N, heads] (−100: unknown), logits [N, V] of head 1 and of the
        target."""
        if not len(batch):
            return
        for head in range(expected.shape[1]):
            known = expected[:, head] >= 0
            self._rank(head, best[known, head], expected[known, head])
        right = (best[:, :, 0] == expected).cpu().numpy()
        places = np.flatnonzero((expected[:, 0] >= 0).cpu().numpy())
        self.shared += overlap(first[places], target[places + 1]).sum().item()
        self._place(batch.positions.cpu().numpy()[places] + 1, right[places, 0])
        self._replay(batch.records, batch.tokens, right, head_cycles)
