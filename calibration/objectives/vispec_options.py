"""Options of a ViSpec layer, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.common.errors import OptionError
from .layer_options import LayerOptions
from .training_options import option

LOSSES = ("published", "described")
STAGES = (1, 2)


@dataclass(frozen=True)
class VispecOptions(LayerOptions):
    """The two stages of ViSpec (arXiv 2509.15235, section 3.3, and the code beside it)."""

    stage: int = option(2, "1: features and distributions, of text; 2: distributions, of pictures.")
    loss: str = option(
        "published",
        "published: with the order of the likeliest tokens, and in stage 2 the L1 of probabilities, as in the authors' "
        "code; described: the cross entropy that the paper prints.",
    )
    start_from: str | None = option(
        None, "Draft that the run begins with: of stage 1, or an EAGLE layer of the same shape."
    )
    compressed_tokens: int = option(1, "Tokens that a picture becomes, beside its global feature.")
    global_feature: bool = option(
        True, "A picture's global feature for all text behind it; without it pictures are their tokens alone."
    )
    multi_token_steps: int | None = option(
        None,
        "Times that the whole text is read again with the features that the layer gave (default: 1 in stage 2).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "compressed_tokens")
        self._at_least(0, "multi_token_steps")
        if self.stage not in STAGES:
            raise OptionError(f"--stage {self.stage!r} is neither 1 nor 2")
        if self.loss not in LOSSES:
            raise OptionError(f"unknown --loss {self.loss!r}; choose one of {', '.join(LOSSES)}")

    @property
    def readings(self) -> int:
        """Of every text."""
        steps = self.multi_token_steps
        return 1 + (self.stage - 1 if steps is None else steps)
