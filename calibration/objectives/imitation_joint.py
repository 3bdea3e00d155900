"""The imitation draft in a training that changes its target: FastVLM's joint epochs, and a backbone that is fine-tuned first.

(arXiv 2510.22641, appendix C and section 5.1.) In the first steps of `--fine-tune` the target learns alone, from the texts; in
those of `--joint` after them both learn, L = CE of the target's own next token + weight · the draft's loss; then the target stays
as it is, and the network goes on. The draft's loss reaches the target by the hidden states that the network reads and by the head that it
uses, but not by what it is compared with: the target's distribution and its fused residuals have no gradient, so that neither
can be moved towards the draft. The draft learns from the second token of an answer on, the target from the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..targets.target import Rows
from . import losses
from .base import Counts, LearnedTarget
from .imitation import AttendingObjective, ImitationObjective
from .imitation_options import ImitationOptions
from .joint import JointObjective


def imitation_objective(
    options: ImitationOptions, target: LearnedTarget, counts: Counts | None = None
) -> ImitationObjective:
    """For a frozen target, row by row or over whole texts, or for one that learns at first."""
    if options.changes_target:
        return JointImitationObjective(options, target, counts)
    return (AttendingObjective if options.attention_heads else ImitationObjective)(options, target, counts)


class JointImitationObjective(JointObjective, ImitationObjective):
    """See the module."""

    method = "FastVLM's training"
    drafting = "the network"
    shown = {"base": "base", **ImitationObjective.shown}

    def __init__(
        self, options: ImitationOptions, target: LearnedTarget, counts: Counts | None = None
    ) -> None:
        super().__init__(options, target, counts)
        base = {id(p) for p in self.base}
        self._drafting = [p for p in self.parameters() if p.requires_grad and id(p) not in base]
        self.step = 0

    @property
    def learning_steps(self) -> tuple[int, int | None]:
        return 0, self.options.fine_tune + (self.options.joint_steps or 0)

    @property
    def base_lr(self) -> float:
        assert self.options.base_lr is not None, "options are completed by the loop's"
        return self.options.base_lr

    def begin(self, step: int) -> None:
        super().begin(step)
        self.step = step
        self._draft_learns(step >= self.options.fine_tune)

    def _draft_learns(self, now: bool) -> None:
        for parameter in self._drafting:
            parameter.requires_grad_(now)

    def groups(self) -> list[dict[str, Any]]:
        """The network's rate begins where it does."""
        self._draft_learns(True)
        *draft, base = super().groups()
        return [*({**group, "start": self.options.fine_tune} for group in draft), base]

    def loss(self, batch: Rows, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:
        """base + weight · draft; parts also have the two, and the draft's."""
        base = losses.cross_entropy(target.head(batch.residuals[:, -1]), batch.tokens)
        drafting = self.step >= self.options.fine_tune
        with torch.set_grad_enabled(torch.is_grad_enabled() and drafting):
            draft, parts = super().loss(batch.select(batch.positions > 0), target)
        total = base + (1.0 if self.options.draft_weight is None else self.options.draft_weight) * draft
        parts |= {"loss": total, "base": base, "draft": draft}
        return total, {name: value.detach() for name, value in parts.items()}

    def score(self, means: Mapping[str, float]) -> float:
        """That of the network; nothing before the target stays as it is, for acceptance by another target is no measure."""
        return -math.inf if self.target_learns(self.step) else super().score(means)
