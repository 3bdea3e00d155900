"""The weighted sum of losses that a run minimises."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...targets.target import FUSED, Rows
from .. import losses
from ..config import TrainConfig

Head = Callable[[Tensor], Tensor]


class Objective(nn.Module):
    """Losses of a draft's rows against a target's rows.

    For `concat-frozen` the four residuals pass a fixed semi-orthogonal projection; for `concat-stopped` a
    projection that learns only from its own cross entropy through the target's head, and whose output the
    cosine sees without gradient, so that the cosine cannot be met by moving its target.
    """

    def __init__(self, config: TrainConfig, hidden_size: int, num_layers: int, head: Head) -> None:
        super().__init__()
        self.config, self.head = config, head
        self.projection: nn.Parameter | None = None
        if config.fusion.startswith("concat") and config.cosine:
            count = min(FUSED, num_layers)
            weight = torch.empty(hidden_size, count * hidden_size)
            if config.fusion == "concat-frozen":
                nn.init.orthogonal_(weight)
            else:  # starts as the average
                weight.copy_(torch.eye(hidden_size).repeat(1, count) / count)
            self.projection = nn.Parameter(weight, requires_grad=config.fusion == "concat-stopped")

    def forward(self, drafted: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, detached parts): `drafted` [N, E] enters the target's head; parts include overlap and agreement."""
        config = self.config
        logits = self.head(drafted)
        with torch.no_grad():
            target_logits = self.head(rows.residuals[:, -1])
        total = drafted.new_zeros(())
        parts: dict[str, Tensor] = {}
        if config.ce:
            parts["ce"] = losses.cross_entropy(logits, rows.tokens)
            total = total + config.ce * parts["ce"]
        if config.kd:
            parts["kd"] = losses.distillation(logits, target_logits, config.kd_distance)
            total = total + config.kd * parts["kd"]
        if config.cosine:
            fused, own = self._fused(rows)
            parts["cosine"] = losses.cosine_distance(drafted, fused)
            total = total + config.cosine * parts["cosine"] + own
        parts["loss"] = total
        parts["overlap"] = losses.overlap(logits.detach(), target_logits).mean()
        parts["agreement"] = losses.agreement(logits.detach(), target_logits).float().mean()
        return total, {name: value.detach() for name, value in parts.items()}

    def _fused(self, rows: Rows) -> tuple[Tensor, Tensor]:
        zero = rows.trunk.new_zeros(())
        if self.config.fusion == "average":
            return losses.average_fusion(rows.residuals), zero
        if self.config.fusion == "last":
            return rows.residuals[:, -1], zero
        assert self.projection is not None
        fused = losses.concatenation_fusion(rows.residuals, self.projection)
        own = losses.cross_entropy(self.head(fused), rows.tokens) if self.projection.requires_grad else zero
        return fused.detach(), own
