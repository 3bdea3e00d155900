"""Options of the imitation draft, without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...runtime.common.errors import OptionError
from .training_options import BASE_LR, FASTEST, LoopOptions, Options, base_rate, option

DISTANCES = ("forward", "reverse", "tv")  # of losses.distillation
FUSIONS = ("average", "last", "concat", "attention")
FUSION_LOSSES = ("own", "cosine", "none")


@dataclass(frozen=True)
class ImitationOptions(Options):
    """`layer` is n, the decoder layer that the draft follows; weights of losses; shape of the network."""

    layer: int = field(
        default=None,  # type: ignore[arg-type]
        metadata={
            "help": "n: the draft follows decoder layer n.",
            "flag": "--draft-layer",
            "required": True,
        },
    )
    ce: float = option(1.0, "Weight of the cross entropy.")
    cosine: float = option(0.0, "Weight of 1 - cos to the fused residuals.")
    kd: float = option(1.0, "Weight of the distance to the target's distribution.")
    kd_distance: str = option("forward", f"{', '.join(DISTANCES)}.")
    fusion: str = option("average", f"How the target's last residuals are fused: {', '.join(FUSIONS)}.")
    fusion_loss: str = option(
        "own",
        "What trains a fusion with weights. own: the cross entropy of its row; cosine: the cosine, as published; none: "
        "nothing (concat only).",
    )
    num_linear: int = option(2, "1 or 2.")
    activation: str = option("gelu", "gelu, silu, relu or none.")
    norm: str = option("layer_norm", "layer_norm, rms_norm or none.")
    residual: bool = option(False, "Add the input to the output.")
    attention_heads: int = option(
        0,
        "Heads of the draft's attention. imitation: over the rows of earlier positions, 0 for none; layers: default the model's.",
    )
    joint: bool = option(
        False,
        "The target's decoder learns with the draft, and changes: Medusa-2 (medusa), or at first (imitation: FastVLM, "
        "appendix C).",
    )
    joint_steps: int | None = option(
        None, "Steps in which both learn, with --joint (default: half of those after --fine-tune)."
    )
    fine_tune: int = option(0, "First steps, in which the target learns alone, and changes.")
    base_lr: float | None = option(
        None,
        f"Highest learning rate of a target that learns (default: a quarter of --lr, at most {BASE_LR:g}).",
    )
    draft_weight: float | None = option(
        None, "Weight of the draft's loss beside the target's, with --joint (default: 1)."
    )

    shape_search = "imitation_search"
    presets = {
        "our": {"ce": 1.0, "cosine": 0.0, "kd": 0.0},
        "our+cs": {"ce": 1.0, "cosine": 1.0, "kd": 0.0},
        "our+cs+kd": {"ce": 1.0, "cosine": 1.0, "kd": 1.0, "kd_distance": "reverse"},
    }
    """FastVLM's ablation (arXiv 2510.22641, table 1): its weights are all 1 and its KL is the reverse one."""

    def feature_layer(self, target: Any) -> int:
        target.check_layer(self.layer)
        return self.layer

    @property
    def whole_texts(self) -> bool:
        """With attention a row depends on all before it, those of prompts among them."""
        return self.attention_heads > 0

    def fused(self, num_layers: int) -> Sequence[int]:
        """The layers whose residuals a fusion joins with the last."""
        from ..targets.target import FUSED

        return range(max(1, num_layers - FUSED + 1), num_layers) if self.cosine else ()

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Of whole texts: the layer that the draft follows, and those that are `fused`."""
        return tuple(sorted({self.layer, *self.fused(num_layers)}))

    @property
    def changes_target(self) -> bool:
        return self.joint or self.fine_tune > 0

    def completed(self, loop: LoopOptions) -> ImitationOptions:
        if not self.changes_target:
            return self
        assert loop.lr is not None
        left = loop.steps - self.fine_tune
        both = self.joint_steps or (max(1, left // 2) if self.joint else 0)
        if left - both < 1:
            raise OptionError(
                f"--fine-tune {self.fine_tune} and {both} steps of --joint leave none of {loop.steps} --steps to the network "
                "alone; change them"
            )
        return replace(
            self,
            joint_steps=both or None,
            base_lr=base_rate(loop.lr) if self.base_lr is None else self.base_lr,
            draft_weight=1.0 if self.joint and self.draft_weight is None else self.draft_weight,
        )

    def __post_init__(self) -> None:
        self._at_least(1, "num_linear", "joint_steps")
        self._at_least(0, "ce", "cosine", "kd", "fine_tune", "attention_heads")
        self._at_least(0, "base_lr", "draft_weight", strictly=True)
        for name in ("joint_steps", "draft_weight"):
            if not self.joint and getattr(self, name) is not None:
                raise OptionError(f"--{name.replace('_', '-')} applies to --joint only, which is not given")
        if self.attention_heads and self.changes_target:
            raise OptionError(
                "--attention-heads is learned beside a target that stays as it is: leave --joint and --fine-tune out"
            )
        if not self.changes_target and self.base_lr is not None:
            raise OptionError("--base-lr is for a target that learns: give --joint or --fine-tune, too")
        if self.base_lr is not None and self.base_lr > FASTEST:
            raise OptionError(f"--base-lr must be at most {FASTEST:g}, not {self.base_lr:g}")
        if not self.ce + self.cosine + self.kd > 0:
            raise OptionError("every loss weight is 0; set --ce, --cosine or --kd above 0")
        if self.kd_distance not in DISTANCES:
            raise OptionError(
                f"unknown --kd-distance {self.kd_distance!r}; choose one of {', '.join(DISTANCES)}"
            )
        if self.fusion not in FUSIONS:
            raise OptionError(f"unknown --fusion {self.fusion!r}; choose one of {', '.join(FUSIONS)}")
        if self.fusion_loss not in FUSION_LOSSES:
            raise OptionError(
                f"unknown --fusion-loss {self.fusion_loss!r}; choose one of {', '.join(FUSION_LOSSES)}"
            )
        if self.fusion_loss != "own" and self.fusion not in ("concat", "attention"):
            raise OptionError(
                f"--fusion-loss {self.fusion_loss} is for a --fusion with weights, concat or attention, not for "
                f"{self.fusion}"
            )
        if self.fusion_loss == "none" and self.fusion == "attention":
            raise OptionError("an attention that does not learn is the average: give --fusion average")
