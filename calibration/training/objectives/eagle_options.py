"""Options of an EAGLE layer, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from ....runtime.errors import OptionError
from ..options import Options, option

HEADS = ("own", "shared", "trimmed")


@dataclass(frozen=True)
class EagleOptions(Options):
    """The shape of the layer, and the published loss (arXiv 2401.15077, section 3.2, and the code beside it)."""

    head: str = option(
        "shared", "own: a copy of the LM head; shared: the LM head itself; trimmed: frequent tokens."
    )
    head_vocabulary: int = option(8192, "Tokens of a trimmed head, the most frequent in the data.")
    attention_heads: int | None = option(None, "Heads of the layer's attention (default: the model's).")
    feed_forward: int | None = option(
        None, "Width of the layer's feed-forward (default: 8/3 of the model's width)."
    )
    feature_weight: float = option(1.0, "Weight of the smooth L1 between features.")
    token_weight: float = option(0.1, "Weight of the soft cross entropy between distributions.")
    feature_noise: float = option(
        0.1, "Largest uniform noise on features of texts up to 512 positions; longer ones get less."
    )
    own_steps: int = option(0, "Further steps in which the layer goes on from its own features.")
    own_decay: float = option(0.8, "Step j of those counts decay^j.")

    @property
    def whole_texts(self) -> bool:
        return True

    def __post_init__(self) -> None:
        self._at_least(1, "head_vocabulary", "attention_heads", "feed_forward")
        self._at_least(0, "feature_weight", "token_weight", "feature_noise", "own_steps")
        self._at_least(0, "own_decay", strictly=True)
        if not self.feature_weight + self.token_weight > 0:
            raise OptionError("every loss weight is 0; set --feature-weight or --token-weight above 0")
        if self.head not in HEADS:
            raise OptionError(f"unknown --head {self.head!r}; choose one of {', '.join(HEADS)}")
