"""Options of an EAGLE layer, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.common.errors import OptionError
from .layer_options import PlacedLayerOptions
from .training_options import option


@dataclass(frozen=True)
class EagleOptions(PlacedLayerOptions):
    """The published loss (arXiv 2401.15077, section 3.2, and the code beside it)."""

    feature_weight: float = option(1.0, "Weight of the smooth L1 between features.")
    token_weight: float = option(0.1, "Weight of the soft cross entropy between distributions.")
    fusion_bias: bool = option(
        True, "A bias where embedding and feature are joined; vLLM's EAGLE layer has none."
    )
    own_steps: int = option(0, "Further steps in which the layer goes on from its own features.")
    own_decay: float = option(0.8, "Step j of those counts decay^j.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "feature_weight", "token_weight", "own_steps")
        self._at_least(0, "own_decay", strictly=True)
        if not self.feature_weight + self.token_weight > 0:
            raise OptionError("every loss weight is 0; set --feature-weight or --token-weight above 0")
