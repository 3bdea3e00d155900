"""What trainings share in which the target's decoder learns beside a draft, and changes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from ...exporter.drafts.common.base import Draft
from ...exporter.drafts.common.files import MODEL
from ...exporter.drafts.common.trained import TrainedDraft
from .base import Counts, LearnedTarget, Objective
from .training_options import Options


class JointObjective(Objective):
    """Comes before an objective of a frozen target among the bases of a class. What the target learns is part of the
    module's state; its vision tower and encoder stay.
    """

    method: ClassVar[str]
    """What changed a target, as its name tells."""
    drafting: ClassVar[str]
    """What learns beside it: "the heads"."""

    def __init__(self, options: Options, target: LearnedTarget, counts: Counts | None = None) -> None:
        super().__init__(options, target, counts)
        self.decoder = target.changing()
        # A list, for the modules themselves stay in `eval`: what a draft reads in training is what it reads later.
        self.base = nn.ParameterList(self.decoder.parameters)
        self.decoder.learn(True)

    @property
    @abstractmethod
    def learning_steps(self) -> tuple[int, int | None]:
        """The step in which the target begins to learn, and the one from which it stays as it is (None: it never does)."""

    @property
    @abstractmethod
    def base_lr(self) -> float:
        """Highest learning rate of the target."""

    @property
    def notice(self) -> str:  # type: ignore[override]
        """What changes, and what the optimizer holds: of every number a gradient and two moments, in float32."""
        learned = sum(p.numel() for p in self.base)
        beside = sum(p.numel() for p in self.network.parameters())
        return (
            f"the target changes: {learned:,} of its parameters learn beside {beside:,} of {self.drafting}; their gradients "
            f"and moments take {12 * (learned + beside) / 1e9:.2f} GB beside the weights and what a batch needs"
        )

    def target_learns(self, step: int) -> bool:
        """Whether the target learns in that step."""
        start, end = self.learning_steps
        return start <= step and (end is None or step < end)

    def begin(self, step: int) -> None:
        self.decoder.learn(self.target_learns(step))

    def groups(self) -> list[dict[str, Any]]:
        """The draft's as ever; the target's rate is its own, and its weights do not decay."""
        draft = super().groups()
        base = {id(p) for p in self.base}
        for group in draft:
            group["params"] = [p for p in group["params"] if id(p) not in base]
        start, end = self.learning_steps
        own = {"weight_decay": 0.0, "peak": self.base_lr, "start": start, "end": end, "rate": "base_lr"}
        return [*draft, {"params": list(self.base), **own}]

    def clipped(self) -> list[list[nn.Parameter]]:
        """Apart, so that the large gradients of a young draft do not take the target's place."""
        base = [p for p in self.base if p.requires_grad]
        return [*super().clipped(), *([base] if base else [])]

    def draft(self, provenance: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Draft:
        """The draft, which fits the target as it is now and says where that came from."""
        draft = super().draft(provenance, evaluation)
        assert isinstance(draft, TrainedDraft)
        origin = self.decoder.origin
        draft.target = draft.target | {
            "name": f"{origin.name}, changed by {self.method}",
            "fingerprint": self.decoder.fingerprint,
            "trained_from": {"name": origin.name, "fingerprint": origin.fingerprint},
        }
        return draft

    def save(self, draft: Draft, folder: Path) -> None:
        """The target first: `draft.json`, which names its weights, is the last file."""
        self.decoder.save(folder / MODEL)
        draft.save(folder)

    def restore(self, folder: Path) -> None:
        self.decoder.restore(folder / MODEL)
