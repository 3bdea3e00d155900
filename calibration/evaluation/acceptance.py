"""Acceptance of a draft on held-out data, in PyTorch.

The imitation network is stateless and the trunk's keys and values are the target's own, so on text that the
target wrote greedily a draft's proposal depends only on accepted tokens, whatever was drafted before. Whether
each position would be accepted is therefore known from one teacher-forced pass, and greedy cycles of any draft
length follow from that vector exactly (`greedy_cycles`); on other text the figure is teacher-forced agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..training.features import FeatureSource
from ..training.losses import agreement, overlap
from ..training.objectives.imitation import Head


@dataclass
class Acceptance:
    """Counts over all answers; identities as in the runtime's statistics."""

    draft_length: int
    proposed: int
    evaluated: int
    accepted: int
    cycles: int
    tokens: int  # emitted after the first, end token included
    agreement: float  # over every position, in no cycle
    overlap: float  # mean Σ min(p, q)
    by_position: list[tuple[int, float, int]]  # (index of the token in its answer, agreement, answers)
    by_depth: list[tuple[int, float, int]]  # (depth in the chain from 1, accepted share, evaluated)

    @property
    def alpha(self) -> float:
        """accepted / evaluated."""
        return self.accepted / max(1, self.evaluated)

    @property
    def tau(self) -> float:
        """Mean tokens per cycle, the bonus included."""
        return self.tokens / max(1, self.cycles)

    def to_dict(self) -> dict[str, Any]:
        """All fields with alpha and tau."""
        return {"alpha": self.alpha, "tau": self.tau, **asdict(self)}


@dataclass
class Cycles:
    """One answer decoded speculatively."""

    proposed: int
    evaluated: list[int]  # by depth, from 1
    accepted: list[int]
    cycles: int


def greedy_cycles(matches: Sequence[bool], draft_length: int) -> Cycles:
    """Replays chain drafting over one answer.

    Args:
        matches: for every token after the first, whether the draft proposes it given the text before it.
        draft_length: d.
    """
    evaluated, accepted = [0] * draft_length, [0] * draft_length
    at, cycles, proposed = 0, 0, 0
    while at < len(matches):
        cycles += 1
        depth = min(draft_length, len(matches) - at)
        proposed += depth
        run = 0
        while run < depth:
            evaluated[run] += 1
            if not matches[at + run]:
                break
            accepted[run] += 1
            run += 1
        at += run + 1  # and the correction or the bonus
    return Cycles(proposed, evaluated, accepted, cycles)


@torch.no_grad()
def measure(
    source: FeatureSource, network: nn.Module, head: Head, draft_length: int = 5, batch_size: int = 64
) -> Acceptance:
    """Acceptance of `network` (an `nn.Identity` is the early exit) over every record of `source`."""
    network.eval()
    evaluated, accepted = np.zeros(draft_length, np.int64), np.zeros(draft_length, np.int64)
    proposed = cycles = tokens = 0
    shared, hits = 0.0, np.zeros(0, np.int64)
    counts = np.zeros(0, np.int64)
    for at in range(0, len(source), batch_size):
        indices = list(range(at, min(at + batch_size, len(source))))
        rows = source.rows(indices)
        if not len(rows):
            continue
        drafted, target = head(network(rows.trunk)), head(rows.residuals[:, -1])
        shared += overlap(drafted, target).sum().item()
        matches = agreement(drafted, target).cpu().numpy()
        positions, owner = rows.positions.cpu().numpy(), rows.records.cpu().numpy()
        longest = max(len(hits), int(positions.max()) + 1)
        hits, counts = np.pad(hits, (0, longest - len(hits))), np.pad(counts, (0, longest - len(counts)))
        np.add.at(hits, positions, matches)
        np.add.at(counts, positions, 1)
        for record in range(len(indices)):
            one = greedy_cycles(matches[owner == record].tolist(), draft_length)
            evaluated += one.evaluated
            accepted += one.accepted
            proposed, cycles = proposed + one.proposed, cycles + one.cycles
            tokens += int((owner == record).sum())
    total = max(1, int(counts.sum()))
    return Acceptance(
        draft_length,
        proposed,
        int(evaluated.sum()),
        int(accepted.sum()),
        cycles,
        tokens,
        float(hits.sum() / total),
        shared / total,
        [(i, round(hits[i] / counts[i], 5), int(counts[i])) for i in range(len(counts)) if counts[i]],
        [
            (i + 1, round(accepted[i] / evaluated[i], 5), int(evaluated[i]))
            for i in range(draft_length)
            if evaluated[i]
        ],
    )
