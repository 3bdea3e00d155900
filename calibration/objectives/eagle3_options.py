"""Options of an EAGLE-3 layer, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.common.errors import OptionError
from .layer_options import PlacedLayerOptions
from .training_options import option


@dataclass(frozen=True)
class Eagle3Options(PlacedLayerOptions):
    """Training-time test (arXiv 2503.01840, section 3.1, and the code beside it)."""

    head: str = option("own", "own: a copy of the LM head that learns; trimmed: of frequent tokens.")
    feature_noise: float = option(0.0, "Largest uniform noise on the joined rows; none as published.")
    own_steps: int = option(6, "Steps beside the first, in which the layer goes on from its own rows.")
    own_decay: float = option(0.8, "Step j counts decay^j.")
    tap_layers: str | None = option(
        None, "Layers whose rows it reads, such as 2,16,29 (default: 2, half of them, all but 3)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "own_steps")
        self._at_least(0, "own_decay", strictly=True)
        if self.head == "shared":
            raise OptionError(
                "--head shared: an EAGLE-3 layer has a norm and a head of its own; give own or trimmed"
            )
        if self.tap_layers is not None:
            parts = self.tap_layers.split(",")
            if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
                raise OptionError(
                    f"--tap-layers {self.tap_layers!r:.40} are not three numbers, such as 2,16,29"
                )

    def taps(self, num_layers: int) -> tuple[int, ...]:
        from ...exporter.drafts.eagle.eagle3_network import default_taps

        if self.tap_layers is None:
            return default_taps(num_layers)
        low, middle, high = (int(part) for part in self.tap_layers.split(","))
        if not 0 < low <= middle <= high < num_layers:
            raise OptionError(f"--tap-layers {self.tap_layers} do not rise within 1..{num_layers - 1}")
        return low, middle, high
