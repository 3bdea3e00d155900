"""Acceptance of Medusa heads on held-out data: what chains of their best tokens would reach.

Heads read the row that the pending token was chosen from, whatever was drafted before, so on text that the target wrote
greedily a teacher-forced pass knows every cycle. The row that chose an answer's first token is not among the rows of a
text: its first cycle counts as one that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from ...runtime.speculate.stats import Stats
from ..targets.target import Rows
from ..training.losses import overlap
from .acceptance import Acceptance


def head_cycles(hits: Sequence[Sequence[bool]], draft_length: int, ended: bool = True) -> Stats:
    """Replays chains of heads over one answer, as the runtime counts them.

    Args:
        hits: [n][heads]; row r chose the (r + 1)-th token after the first, and head k + 1 is right there or not.
        draft_length: d, at most the number of heads.
        ended: the last token is an end token; otherwise the limit cut the answer (see `greedy_cycles`).
    """
    stats, at = Stats(tokens=1 + len(hits)), 0
    while at < len(hits):
        left = len(hits) - at
        depth = min(draft_length, left if ended else left - 1) if at else 0
        run = 0
        while run < depth and hits[at - 1][run]:
            run += 1
        stats.count(depth, run, min(run + 1, depth))
        stats.discarded += max(0, run + 1 - left)
        at += run + 1
    return stats


class HeadCount:
    """Collects the acceptance of heads, batch by batch; `agreement` and `overlap` are of head 1."""

    def __init__(self, draft_length: int, eos_token_ids: Collection[int]) -> None:
        self.draft_length, self.eos = draft_length, set(eos_token_ids)
        self.cycles = Stats.total([])
        self.tokens, self.shared = 0, 0.0
        self.hits, self.answers = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def add(self, best: Tensor, wanted: Tensor, first: Tensor, target: Tensor, rows: Rows) -> None:
        """`best` and `wanted` int64 [N, heads] (−100: unknown), logits [N, V] of head 1 and of the target."""
        if not len(rows):
            return
        right = (best == wanted).cpu().numpy()
        owner, positions = rows.records.cpu().numpy(), rows.positions.cpu().numpy()
        known = (wanted[:, 0] >= 0).cpu().numpy()
        places = np.flatnonzero(known)
        if len(places):
            self.shared += overlap(first[places], target[places + 1]).sum().item()
            longest = max(len(self.hits), int(positions[places].max()) + 2)
            self.hits = np.pad(self.hits, (0, longest - len(self.hits)))
            self.answers = np.pad(self.answers, (0, longest - len(self.answers)))
            np.add.at(self.hits, positions[places] + 1, right[places, 0])
            np.add.at(self.answers, positions[places] + 1, 1)
        last = rows.tokens.cpu().numpy()
        for record in np.unique(owner):
            mine = owner == record
            ended = int(last[mine][-1]) in self.eos
            one = head_cycles(right[mine].tolist(), min(self.draft_length, right.shape[1]), ended)
            self.cycles = Stats.total([self.cycles, one])
            self.tokens += int(mine.sum())

    def result(self) -> Acceptance:
        """The figures over everything that was added."""
        return Acceptance.of(
            self.cycles, self.draft_length, self.tokens, self.shared, self.hits, self.answers
        )
