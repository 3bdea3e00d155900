"""Acceptance of a draft on held-out data, in PyTorch.

A self-draft has no state and the trunk's keys and values are the target's own, so on text that the target wrote
greedily a draft's proposal depends only on accepted tokens, whatever was drafted before. Whether each position
would be accepted is therefore known from one teacher-forced pass, and greedy cycles of any draft length follow from
that vector exactly (`greedy_cycles`); on other text the figure is teacher-forced agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ...runtime.speedup.stats import Stats
from ..features.features import FeatureSource, in_batches
from ..objectives.losses import agreement, overlap
from ..targets.teacher_forcing import Rows

RANKS = 8
"""Proposals of a head that are looked at."""


def likeliest(logits: Tensor) -> Tensor:
    """int64 [..., RANKS], or as many as there are words: the best first, of equals the first one leading."""
    best = logits.argmax(-1, keepdim=True)
    rest = logits.scatter(-1, best, -torch.inf).topk(min(RANKS, logits.shape[-1]) - 1).indices
    return torch.cat([best, rest], -1)


@dataclass
class Acceptance:
    """Counts over all answers; identities as in the runtime's statistics, whose formulas `alpha` and `tau` use."""

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
    by_rank: list[list[float]] = field(default_factory=list)
    """[head][r]: share of places whose token is among a head's r + 1 likeliest, over every position; a draft that says
    one token at a time has one head."""
    bound: float | None = None  # see `speed.bound`
    speedup: float | None = None  # predicted by a machine's pass times, where these are known

    @property
    def alpha(self) -> float:
        """accepted / evaluated; 0 where nothing was."""
        return Stats(accepted=self.accepted, evaluated=self.evaluated).alpha or 0.0

    @property
    def tau(self) -> float:
        """Mean tokens per cycle, the bonus included, also one that follows the end."""
        return Stats(accepted=self.accepted, cycles=self.cycles).tau

    @classmethod
    def of(
        cls,
        stats: Stats,
        draft_length: int,
        tokens: int,
        shared: float,
        hits: np.ndarray,
        answers: np.ndarray,
        ranked: np.ndarray | None = None,
    ) -> Acceptance:
        """From the cycles of all answers, the sum of Σ min(p, q), right and all proposals by position, and, int64
        [heads, RANKS + 1], how often each rank is right, behind it all places."""
        total = max(1, int(answers.sum()))
        depths = zip(stats.accepted_by_depth, stats.evaluated_by_depth, strict=True)
        return cls(
            draft_length, stats.proposed, stats.evaluated, stats.accepted, stats.cycles, tokens,
            float(hits.sum() / total),
            shared / total,
            [(i, round(h / n, 5), int(n)) for i, (h, n) in enumerate(zip(hits, answers, strict=True)) if n],
            [
                (i, round(accepted / evaluated, 5), evaluated)
                for i, (accepted, evaluated) in enumerate(depths, 1)
                if evaluated
            ],
            [] if ranked is None else [[round(float(v), 5) for v in row[:-1].cumsum() / row[-1]] for row in ranked if row[-1]],
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """All fields with alpha and tau."""
        return {"alpha": self.alpha, "tau": self.tau, **asdict(self)}


def greedy_cycles(matches: Sequence[bool], draft_length: int, ended: bool = True) -> Stats:
    """Replays chain drafting over one answer, as the runtime counts it.

    Args:
        matches: for every token after the first, whether the draft proposes it given the text before it.
        draft_length: d.
        ended: the last token is an end token, which a draft may propose; otherwise the limit cut the answer, and the
            last cycle drafts one token less than are left, since verification gives one itself.
    """
    stats, at = Stats(tokens=1 + len(matches)), 0
    while at < len(matches):
        left = len(matches) - at
        depth = min(draft_length, left if ended else left - 1)
        run = 0
        while run < depth and matches[at + run]:
            run += 1
        stats.count(depth, run, min(run + 1, depth))
        stats.discarded += max(0, run + 1 - left)
        at += run + 1  # and the correction or the bonus
    return stats


def chain_cycles(hits: Sequence[Sequence[bool]], draft_length: int, ended: bool = True) -> Stats:
    """Replays chains of a draft that proposes several tokens at once over one answer, as the runtime counts them.

    Args:
        hits: [n][depth], n tokens after the first: with r + 1 tokens emitted, whether the token that is proposed at each
            depth is right, given that those before it were. What is behind the last one is not proposed.
        draft_length: d. ended: as for `greedy_cycles`.
    """
    stats, at = Stats(tokens=1 + len(hits)), 0
    while at < len(hits):
        left = len(hits) - at
        depth = min(draft_length, len(hits[at]), left if ended else left - 1)
        run = 0
        while run < depth and hits[at][run]:
            run += 1
        stats.count(depth, run, min(run + 1, depth))
        stats.discarded += max(0, run + 1 - left)
        at += run + 1
    return stats


class _Head(Protocol):
    """What is needed of a target."""

    @property
    def eos_token_ids(self) -> Collection[int]: ...
    def head(self, hidden_states: Tensor) -> Tensor: ...


class Counted:
    """What is collected of one draft, batch by batch, whatever its kind."""

    def __init__(self, draft_length: int, eos_token_ids: Collection[int]) -> None:
        self.draft_length, self.eos = draft_length, set(eos_token_ids)
        self.cycles = Stats.total([])
        self.tokens, self.shared = 0, 0.0
        self.hits, self.answers = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.ranked = np.zeros((0, RANKS + 1), np.int64)

    def result(self) -> Acceptance:
        """The figures over everything that was added."""
        return Acceptance.of(
            self.cycles, self.draft_length, self.tokens, self.shared, self.hits, self.answers, self.ranked
        )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Where what is done inside fails, nothing of it is counted."""
        kept = (
            self.cycles,
            self.tokens,
            self.shared,
            self.hits.copy(),
            self.answers.copy(),
            self.ranked.copy(),
        )
        try:
            yield
        except BaseException:
            self.cycles, self.tokens, self.shared, self.hits, self.answers, self.ranked = kept
            raise

    def _rank(self, head: int, ids: Tensor, wanted: Tensor) -> None:
        """Of `head` its likeliest tokens, int64 [N, ranks], and the ones that are right, int64 [N]."""
        if len(self.ranked) <= head:
            self.ranked = np.pad(self.ranked, ((0, head + 1 - len(self.ranked)), (0, 0)))
        hits = (ids[:, :RANKS] == wanted[:, None]).sum(0).cpu().numpy()
        self.ranked[head, : len(hits)] += hits
        self.ranked[head, -1] += len(wanted)

    def _place(self, positions: np.ndarray, right: np.ndarray) -> None:
        """Proposals for tokens at these positions of their answers, and whether each is right."""
        if not len(positions):
            return
        longest = max(len(self.hits), int(positions.max()) + 1)
        self.hits = np.pad(self.hits, (0, longest - len(self.hits)))
        self.answers = np.pad(self.answers, (0, longest - len(self.answers)))
        np.add.at(self.hits, positions, right)
        np.add.at(self.answers, positions, 1)

    def _replay(
        self, records: Tensor, tokens: Tensor, right: np.ndarray, cycles: Callable[[Any, int, bool], Stats]
    ) -> None:
        """Counts `cycles(right, draft_length, ended)` of every record; `right` has an entry for each of `records` and
        `tokens` int64 [N], whose each and what it says."""
        owner, said = records.cpu().numpy(), tokens.cpu().numpy()
        for record in np.unique(owner):
            mine = owner == record
            one = cycles(right[mine].tolist(), self.draft_length, int(said[mine][-1]) in self.eos)
            self.cycles = Stats.total([self.cycles, one])
            self.tokens += int(mine.sum())


class Count(Counted):
    """Collects the acceptance of a draft that proposes a token for every row."""

    def add(self, drafted: Tensor, target: Tensor, batch: Rows) -> None:
        """`drafted` and `target` are logits [N, V] of the batch's rows."""
        if not len(batch):
            return
        self.shared += overlap(drafted, target).sum().item()
        self._rank(0, likeliest(drafted), target.argmax(-1))
        matches = agreement(drafted, target).cpu().numpy()
        self._place(batch.positions.cpu().numpy(), matches)
        self._replay(batch.records, batch.tokens, matches, greedy_cycles)


@torch.no_grad()
def measure(
    source: FeatureSource, network: nn.Module, target: _Head, draft_length: int = 5, batch_size: int = 64
) -> Acceptance:
    """Acceptance of `network` (an `nn.Identity` is the early exit) over every record of `source`."""
    network.eval()
    count = Count(draft_length, target.eos_token_ids)
    for batch in in_batches(source, batch_size):
        count.add(target.head(network(batch.trunk)), target.head(batch.residuals[:, -1]), batch)
    return count.result()
