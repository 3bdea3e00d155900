"""What a draft kind brings to training; the loop knows nothing else of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from ...exporter.drafts.common.base import Draft
from ...exporter.families.common.base import Family
from ...exporter.families.common.parts import DecoderShape
from ..features.features import FeatureSource
from ..targets.changing import ChangingDecoder
from ..targets.target import Rows
from .training_options import Options

Counts = Callable[[], Tensor]
"""How often every token of the vocabulary stands in the training data, int64 [V]; counted when asked."""


class LearnedTarget(Protocol):
    """The target as an objective sees it; frozen, unless one asks for what is `changing`."""

    name: str
    family: Family
    lm_head: Any
    """A linear layer without bias, [V, E]."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def decoder(self) -> DecoderShape: ...
    @property
    def hidden_size(self) -> int: ...
    def head(self, hidden_states: Tensor) -> Tensor:
        """[..., E] before the final norm to logits [..., V]."""
        ...

    def logits(self, features: Tensor) -> Tensor:
        """What the LM head reads [..., E] to logits [..., V]."""
        ...

    def features(self, hidden_states: Tensor) -> Tensor:
        """[..., E] before the final norm to what the LM head reads."""
        ...

    def changing(self) -> ChangingDecoder:
        """The part of it that a joint training changes."""
        ...


def identity_of(target: LearnedTarget) -> dict[str, Any]:
    """What a draft says of the target it was trained for."""
    return {"name": target.name, "fingerprint": target.fingerprint, "num_layers": target.num_layers}


class Objective(nn.Module, ABC):
    """One draft in training: its network, what it learns from and what it minimises.

    All parameters and buffers of the module are the run's state. `network` is what the exported draft holds; other
    parameters (a projection that only a loss uses) are trained beside it and dropped.
    """

    kind: ClassVar[str]
    network: nn.Module
    options: Options

    @abstractmethod
    def loss(self, batch: Rows, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, detached parts by name). Parts are means over rows, and `loss` is one of them."""

    @abstractmethod
    def score(self, means: Mapping[str, float]) -> float:
        """From the means of a validation: the higher, the better."""

    shown: ClassVar[dict[str, str]] = {}
    """Label → part, for the progress line."""

    @abstractmethod
    def learning_rate(self, hidden_size: int) -> float:
        """The rate for a target of this width where the user gives none."""

    notice = ""
    """A line for the user before the first step."""

    def begin(self, step: int) -> None:
        """Before the rows of a step are read: what learns in it."""
        return

    def clipped(self) -> list[list[nn.Parameter]]:
        """Parameters whose gradients are cut together, by the norm of each list."""
        return [list(self.network.parameters())]

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups: matrices of the network decay, all else does not.

        A group may have its highest learning rate `peak` (default: the run's), the step `start` from which its rate
        warms up (default: the first), the step `end` where it is 0 (default: behind the last), and a name for the log,
        `rate` (default: `lr`).
        """
        own = list(self.network.parameters())
        inside = {id(p) for p in own}
        rest = [p for p in self.parameters() if id(p) not in inside and p.requires_grad]
        return [
            {"params": [p for p in own if p.ndim > 1]},
            {"params": [*(p for p in own if p.ndim <= 1), *rest], "weight_decay": 0.0},
        ]

    def save(self, draft: Draft, folder: Path) -> None:
        """Writes the draft as it stands, and what it needs beside it."""
        draft.save(folder)

    def restore(self, folder: Path) -> None:
        """Brings the target to where it was when `save` wrote this folder."""
        return

    def finished(self, draft: Draft, source: FeatureSource, target: LearnedTarget) -> Draft:
        """What a complete run gives: its best `draft`, perhaps with what can only be measured at the end, on the
        validation's rows."""
        return draft

    @abstractmethod
    def draft(self, provenance: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Draft:
        """The draft as it stands; `save` writes its folder."""
