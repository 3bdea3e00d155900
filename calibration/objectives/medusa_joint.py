"""Medusa-2 in training: the target's decoder learns with its heads, and changes.

(Cai et al., arXiv 2401.10774, section 2.2.2.) L = CE of the target's own next token + λ · Σ_k decay^k · CE of head k. The
paper's three measures against a target that forgets are here: the combined loss, two learning rates, and heads that
learn alone at first, since what an untrained head asks for would distort the target (where the paper says that the backbone
is trained first, it means the heads: github.com/FasterDecoding/Medusa, issue 74). After them the target's rate warms up
as the heads' did.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..targets.target import Rows
from . import losses
from .base import Counts, LearnedTarget
from .joint import JointObjective
from .medusa import MedusaObjective
from .medusa_options import MedusaOptions


def medusa_objective(
    options: MedusaOptions, target: LearnedTarget, counts: Counts | None = None
) -> MedusaObjective:
    """Medusa-1, or where the target learns with the heads, Medusa-2."""
    return (JointMedusaObjective if options.joint else MedusaObjective)(options, target, counts)


class JointMedusaObjective(JointObjective, MedusaObjective):
    """See the module."""

    method = "Medusa-2"
    drafting = "the heads"
    shown = {"base": "base", **MedusaObjective.shown}

    @property
    def learning_steps(self) -> tuple[int, int | None]:
        """The heads alone, then both."""
        return self.options.warm_up_heads or 0, None

    @property
    def base_lr(self) -> float:
        assert self.options.base_lr is not None, "options are completed by the loop's"
        return self.options.base_lr

    def loss(self, batch: Rows, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:
        """base + λ · heads; parts also have the two, and each head's."""
        assert self.options.head_weight is not None, "options are completed by the loop's"
        features = target.features(batch.residuals[:, -1])
        base = losses.cross_entropy(target.logits(features), batch.tokens)
        heads, parts = self.heads_loss(features, batch, target)
        total = base + self.options.head_weight * heads
        parts |= {"loss": total, "base": base, "heads": heads}
        return total, {name: value.detach() for name, value in parts.items()}

    def score(self, means: Mapping[str, float]) -> float:
        """The loss itself: more hits of the heads are no gain where the target forgets."""
        return -means["loss"]
