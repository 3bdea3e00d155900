"""Early exit: the hidden states after draft layer n go straight into the target's final norm and LM head.

(Elhoushi et al., LayerSkip, arXiv 2404.16710.) It has no weights and no graph: the bundle only needs the cut at n.
"""

from __future__ import annotations

from torch import nn

from .common.base import SelfDraft, UntrainedKind


class EarlyExit(SelfDraft):
    """The exit at `layer`."""

    kind = "early-exit"

    def __init__(self, layer: int) -> None:
        self.layer, self.network = layer, nn.Identity()


class EarlyExitKind(UntrainedKind):
    """See the module."""

    name = EarlyExit.kind
    title = "the first n layers with the model's own head"
    has_layer = True

    def at(self, layer: int | None) -> EarlyExit:
        if layer is None:
            raise ValueError(f"{self.name} needs a layer")
        return EarlyExit(layer)
