"""Options that drafts with a layer of their own share, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.common.errors import OptionError
from .training_options import Options, option

HEADS = ("own", "shared", "trimmed")
POSITIONS = ("counted", "model")


@dataclass(frozen=True)
class LayerOptions(Options):
    """The shape of the layer, and the noise on what it learns from."""

    head: str = option(
        "shared", "own: a copy of the LM head; shared: the LM head itself; trimmed: frequent tokens."
    )
    head_vocabulary: int = option(8192, "Tokens of a trimmed head, the most frequent in the data.")
    attention_heads: int | None = option(None, "Heads of the layer's attention (default: the model's).")
    feed_forward: int | None = option(
        None, "Width of the layer's feed-forward (default: 8/3 of the model's width)."
    )
    rotary_base: float | None = option(
        None, "Base of the layer's rotary positions (default: the model's, 10,000 where it has none)."
    )
    feature_noise: float = option(
        0.1, "Largest uniform noise on features of texts up to 512 positions; longer ones get less."
    )

    @property
    def whole_texts(self) -> bool:
        return True

    def __post_init__(self) -> None:
        self._at_least(1, "head_vocabulary", "attention_heads", "feed_forward")
        self._at_least(1, "rotary_base")
        self._at_least(0, "feature_noise")
        if self.head not in HEADS:
            raise OptionError(f"unknown --head {self.head!r}; choose one of {', '.join(HEADS)}")


@dataclass(frozen=True)
class PlacedLayerOptions(LayerOptions):
    """Of a layer that may be given the model's own positions."""

    positions: str = option(
        "counted",
        "counted: the layer's positions have one axis; model: they are the model's own, of M-RoPE (Qwen-VL).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in POSITIONS:
            raise OptionError(f"unknown --positions {self.positions!r}; choose one of {', '.join(POSITIONS)}")
