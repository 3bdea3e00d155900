"""How a model is quantised."""

from __future__ import annotations

from dataclasses import dataclass

from ...exporter.quantization.blocks import BLOCK
from ...exporter.quantization.choice import WeightsChoice


@dataclass(frozen=True)
class QuantizeOptions:
    """`method` is one of `layerwise.METHODS`; `samples` records of at most `max_tokens` tokens of text calibrate; `max_loss` is the most KL
    to the float model."""

    weights: WeightsChoice
    method: str = "gptq"
    samples: int = 128
    max_tokens: int = 512
    max_loss: float | None = None
    block: int = BLOCK
