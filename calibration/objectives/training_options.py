"""Options of a training run that no draft kind knows: steps, batches, rates. Kinds have their own (`objectives/`).

A field's `help` and `flag` are what `vlmexport train` shows; nothing here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from ...runtime.common.errors import OptionError

FASTEST = 1e30
"""Largest learning rate that an optimizer of float32 can take a step with."""

BASE_LR = 2.5e-4
"""Default rate of a target that learns with a draft, a quarter of the published 1e-3; less beside a draft of less than that."""


def base_rate(lr: float) -> float:
    """The default rate of a target that learns with a draft, whose own is `lr`."""
    return min(lr / 4, BASE_LR)


def option(default: Any, help: str = "", flag: str | None = None, expert: bool = True) -> Any:
    """A dataclass field with its place on the command line; `flag` defaults to the field's name. `expert`: shown by
    `--help-all` only."""
    return field(default=default, metadata={"help": help, "flag": flag, "expert": expert})


def flag_of(name: str, metadata: Mapping[str, Any]) -> str:
    """`--some-name` of a field."""
    return metadata.get("flag") or f"--{name.replace('_', '-')}"


class Options:
    """Base of frozen dataclasses of options."""

    presets: ClassVar[dict[str, dict[str, object]]] = {}
    """Name for `--preset` → values."""
    shape_search: ClassVar[str | None] = None
    """The module of `calibration/training/` that searches the network's shape; None for a kind without one."""

    @classmethod
    def of(cls, given: Mapping[str, Any], preset: str | None = None) -> Any:
        """From given values, `None` meaning the default; a preset's values win.

        Raises OptionError for an unknown preset, a value that does not fit, or one that is missing.
        """
        values = {name: value for name, value in given.items() if value is not None}
        if preset is not None:
            preset_values = cls.presets.get(preset.lower())
            if preset_values is None:
                known = ", ".join(cls.presets) or "none for this draft"
                raise OptionError(f"unknown --preset {preset!r}; choose one of {known}")
            values |= preset_values
        for one in fields(cls):  # type: ignore[arg-type]
            if one.default is None and one.metadata.get("required") and one.name not in values:
                raise OptionError(f"give {flag_of(one.name, one.metadata)}: {one.metadata['help']}")
        return cls(**values)

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """Each field's default."""
        return {one.name: one.default for one in fields(cls)}  # type: ignore[arg-type]

    def feature_layer(self, target: Any) -> int:
        """Which layer's hidden states are `Rows.trunk` for this draft: the last layer's unless a kind says otherwise.

        Raises OptionError when the target has no such layer.
        """
        return target.num_layers

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Layers, of so many, whose hidden states a draft learns from beside the last one's."""
        return ()

    @property
    def whole_texts(self) -> bool:
        """Whether the draft learns from whole texts (`Texts`), prompts included, in place of single positions."""
        return False

    @property
    def changes_target(self) -> bool:
        """Whether the target learns too, so that its hidden states are others after every step."""
        return False

    def completed(self, loop: LoopOptions) -> Options:
        """The same with the defaults that follow from the loop's options, whose `lr` is set. OptionError where the two
        do not fit."""
        return self

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)  # type: ignore[call-overload]

    def _at_least(self, least: float, *names: str, strictly: bool = False) -> None:
        """OptionError naming the first of these fields that is below `least` (or equal, when `strictly`)."""
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if (
                one.name in names
                and value is not None
                and not (value > least if strictly else value >= least)
            ):
                bound = f"above {least:g}" if strictly else f"at least {least:g}"
                raise OptionError(f"{flag_of(one.name, one.metadata)} must be {bound}, not {value}")


@dataclass(frozen=True)
class LoopOptions(Options):
    """Options of the loop; two runs with equal options, data and target end with equal weights on one CPU."""

    steps: int = option(1500, "Steps of the optimizer.", expert=False)
    batch_size: int = option(64, "Records per step, over all processes.", expert=False)
    lr: float | None = option(
        None,
        "Highest learning rate (default: by the draft's kind and the model's width).",
        expert=False,
    )
    weight_decay: float = option(0.01, "Decoupled decay of matrices.")
    warmup: int = option(50, "Steps of linear warm-up.")
    clip: float = option(1.0, "Largest gradient norm.")
    clip_value: float | None = option(None, "Largest absolute gradient of one number (default: no limit).")
    seed: int = option(0, "Seed of weights and order.")

    def __post_init__(self) -> None:
        self._at_least(1, "steps", "batch_size")
        self._at_least(0, "lr", "clip", "clip_value", strictly=True)
        self._at_least(0, "warmup", "weight_decay")
        if self.lr is not None and self.lr > FASTEST:  # the optimizer's numbers are float32
            raise OptionError(f"--lr must be at most {FASTEST:g}, not {self.lr:g}")

    def with_rate(self, default: float) -> LoopOptions:
        """The same with `lr` set."""
        return self if self.lr is not None else replace(self, lr=default)
