"""Medusa-2 in training: the target's decoder learns with its heads, and changes.

(Cai et al., arXiv 2401.10774, section 2.2.2.) L = CE of the target's own next token + λ · Σ_k decay^k · CE of head k. The
paper's three measures against a target that forgets are here: the combined loss, two learning rates, and heads that
learn alone at first, since what an untrained head asks for would distort the target (where the paper says that the backbone
is trained first, it means the heads: github.com/FasterDecoding/Medusa, issue 74). After them the target's rate warms up
as the heads' did.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ....exporter.drafts.base import Draft
from ....exporter.drafts.files import MODEL
from ....exporter.drafts.medusa import MedusaDraft
from ...targets.target import Rows
from .. import losses
from .base import Counts, LearnedTarget
from .medusa import MedusaObjective
from .medusa_options import MedusaOptions


class JointMedusaObjective(MedusaObjective):
    """See the module. What the target learns is part of the module's state; its vision tower and encoder stay."""

    shown = {"base": "base", **MedusaObjective.shown}

    def __init__(self, options: MedusaOptions, target: LearnedTarget, counts: Counts | None = None) -> None:
        super().__init__(options, target, counts)
        self.decoder = target.changing()
        # A list, for the modules themselves stay in `eval`: what heads read in training is what they read later.
        self.base = nn.ParameterList(self.decoder.parameters)
        self.decoder.learn(True)

    @property
    def notice(self) -> str:  # type: ignore[override]
        """What changes, and what the optimizer holds: of every number a gradient and two moments, in float32."""
        learned = sum(p.numel() for p in self.base)
        heads = sum(p.numel() for p in self.network.parameters())
        return (
            f"the target changes: {learned:,} of its parameters learn beside {heads:,} of the heads; their gradients and "
            f"moments take {12 * (learned + heads) / 1e9:.2f} GB beside the weights and what a batch needs"
        )

    def begin(self, step: int) -> None:
        """The heads alone, then both."""
        self.decoder.learn(step >= (self.options.warm_up_heads or 0))

    def groups(self) -> list[dict[str, Any]]:
        """The heads' as ever; the target's own rate begins after their warm-up, and its weights do not decay."""
        heads = super().groups()
        base = {id(p) for p in self.base}
        for group in heads:
            group["params"] = [p for p in group["params"] if id(p) not in base]
        options = self.options
        return [
            *heads,
            {
                "params": list(self.base),
                "weight_decay": 0.0,
                "peak": options.base_lr,
                "start": options.warm_up_heads or 0,
                "rate": "base_lr",
            },
        ]

    def clipped(self) -> list[list[nn.Parameter]]:
        """Apart, so that the large gradients of young heads do not take the target's place."""
        base = [p for p in self.base if p.requires_grad]
        return [*super().clipped(), *([base] if base else [])]

    def loss(self, batch: Rows, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:
        """base + λ · heads; parts also have the two, and each head's."""
        assert self.options.head_weight is not None, "options are completed by the loop's"
        rows = target.features(batch.residuals[:, -1])
        base = losses.cross_entropy(target.lm_head(rows), batch.tokens)
        heads, parts = self.heads_loss(rows, batch, target)
        total = base + self.options.head_weight * heads
        parts |= {"loss": total, "base": base, "heads": heads}
        return total, {name: value.detach() for name, value in parts.items()}

    def score(self, means: Mapping[str, float]) -> float:
        """The loss itself: more hits of the heads are no gain where the target forgets."""
        return -means["loss"]

    def draft(self, provenance: Mapping[str, Any], evaluation: Mapping[str, Any]) -> MedusaDraft:
        """The heads, which fit the target as it is now and say where it came from."""
        found = super().draft(provenance, evaluation)
        origin = self.decoder.origin
        found.target = self.target | {
            "name": f"{origin.name}, changed by Medusa-2",
            "fingerprint": self.decoder.fingerprint,
            "trained_from": {"name": origin.name, "fingerprint": origin.fingerprint},
        }
        return found

    def save(self, draft: Draft, folder: Path) -> None:
        """The target first: `draft.json`, which names its weights, is the last file."""
        self.decoder.save(folder / MODEL)
        draft.save(folder)

    def restore(self, folder: Path) -> None:
        self.decoder.restore(folder / MODEL)
