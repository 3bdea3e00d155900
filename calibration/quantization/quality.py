"""What integers cost: a target's distributions on held-out texts, beside those of the float model."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ...runtime.common.errors import InputError
from ..data.reading.records import Record, RecordSet
from ..targets.batches import Batches
from ..targets.target import Target

BATCH = 8
"""Records that go through the target together."""
ROWS = 64
"""Positions whose distributions are in memory at once."""


@dataclass(frozen=True)
class Quality:
    """Over `tokens` of held-out answers: perplexity, the share of positions where the likeliest token is the float model's, and the
    mean Kullback-Leibler divergence of the float model's distribution from this one, in nats."""

    tokens: int
    perplexity: float
    agreement: float = 1.0
    kl: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


class FloatReference:
    """What a target says of held-out records before it is quantised."""

    def __init__(self, target: Target, records: RecordSet, head_changes: bool = True) -> None:
        """Reads the records once. With `head_changes` the LM head is copied. Raises InputError where they hold no token."""
        self._target, self._records = target, records
        self._head = copy.deepcopy(target.lm_head) if head_changes else target.lm_head
        self._features, self._tokens = self._read()
        if not len(self._tokens):
            raise InputError(f"{records.name} has no token of an answer to measure on")
        self.quality = self._compare(self._features)

    def measure(self) -> Quality:
        """Of the target as it is now."""
        return self._compare(self._read()[0])

    @torch.no_grad()
    def _read(self) -> tuple[Tensor, Tensor]:
        """(what the LM head reads [N, E], tokens that follow [N]) of every token of the answers, the first included."""
        target = self._target

        def read(chunk: list[Record]) -> tuple[Tensor, Tensor]:
            rows, _ = target.rows(chunk, [target.num_layers], first=True)
            return target.features(rows.residuals[:, -1]), rows.tokens

        batches = Batches(BATCH, flag=None).over(self._records.records, read)  # type: ignore[arg-type]
        features, tokens = zip(*(result for _, result in batches), strict=True)
        return torch.cat(features), torch.cat(tokens)

    @torch.no_grad()
    def _compare(self, features: Tensor) -> Quality:
        loss = kl = same = 0.0
        parts = zip(self._features.split(ROWS), features.split(ROWS), self._tokens.split(ROWS), strict=True)
        for before, now, tokens in parts:
            ours = self._target.logits(now).log_softmax(-1)
            theirs = self._target.capped(self._head(before)).log_softmax(-1)
            loss -= float(ours.gather(1, tokens[:, None]).sum(dtype=torch.float64))
            kl += float((theirs.exp() * (theirs - ours)).sum(dtype=torch.float64))
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count = len(self._tokens)
        return Quality(count, math.exp(min(loss / count, 700.0)), same / count, max(kl / count, 0.0))
