"""Everything that decides the result of a training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ...runtime.errors import OptionError
from .losses import DISTANCES, FUSIONS

PRESETS: dict[str, dict[str, object]] = {
    "our": {"ce": 1.0, "cosine": 0.0, "kd": 0.0},
    "our+cs": {"ce": 1.0, "cosine": 1.0, "kd": 0.0},
    "our+cs+kd": {"ce": 1.0, "cosine": 1.0, "kd": 1.0, "kd_distance": "reverse"},
}
"""FastVLM's ablation (arXiv 2510.22641, table 1): its weights are all 1 and its KL is the reverse one."""


@dataclass(frozen=True)
class TrainConfig:
    """Options of a run; two runs with equal options, data and target end with equal weights on one CPU."""

    layer: int
    steps: int = 1500
    batch_size: int = 64  # records per step, over all processes
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 50  # steps
    clip: float = 1.0  # gradient norm
    seed: int = 0
    ce: float = 1.0
    cosine: float = 0.0
    kd: float = 1.0
    kd_distance: str = "forward"
    fusion: str = "average"
    num_linear: int = 2
    activation: str = "gelu"
    norm: str = "layer_norm"
    residual: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "num_linear"):
            if getattr(self, name) < 1:
                raise OptionError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise OptionError(f"--{name} must be positive, not {getattr(self, name)}")
        for name in ("ce", "cosine", "kd", "warmup", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise OptionError(
                    f"--{name.replace('_', '-')} must not be negative, is {getattr(self, name)}"
                )
        if not self.ce + self.cosine + self.kd > 0:
            raise OptionError("every loss weight is 0; set --ce, --cosine or --kd above 0")
        if self.kd_distance not in DISTANCES:
            raise OptionError(
                f"unknown --kd-distance {self.kd_distance!r}; choose one of {', '.join(DISTANCES)}"
            )
        if self.fusion not in FUSIONS:
            raise OptionError(f"unknown --fusion {self.fusion!r}; choose one of {', '.join(FUSIONS)}")

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def with_preset(options: dict[str, object], preset: str | None) -> dict[str, object]:
    """`options` with a preset's losses in place of theirs; OptionError for an unknown preset."""
    if preset is None:
        return options
    found = PRESETS.get(preset.lower())
    if found is None:
        raise OptionError(f"unknown --preset {preset!r}; choose one of {', '.join(PRESETS)}")
    return options | found
