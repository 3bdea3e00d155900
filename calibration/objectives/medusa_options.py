"""Options of Medusa heads, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...runtime.common.errors import OptionError
from .training_options import BASE_LR, FASTEST, LoopOptions, Options, base_rate, option

HEADS = ("own", "shared", "trimmed")
JOINTLY = ("base_lr", "head_weight", "warm_up_heads")
"""Options of joint training alone."""

HEAD_WEIGHT = 0.2
"""λ of the published recipe of joint training on given texts."""


@dataclass(frozen=True)
class MedusaOptions(Options):
    """How many heads, what each is made of, how much a far one counts, and whether the target learns with them."""

    heads: int = option(4, "Heads: how many tokens are proposed after the next one.", expert=False)
    head_layers: int = option(1, "Residual blocks of each head.")
    head: str = option(
        "own", "own: a copy of the LM head in each; shared: the LM head itself; trimmed: frequent tokens."
    )
    head_vocabulary: int = option(8192, "Tokens of a trimmed head, the most frequent in the data.")
    decay: float = option(0.8, "Head k counts decay^k.", flag="--head-decay")
    joint: bool = option(False, "Medusa-2: the target's decoder learns with the heads, and changes.")
    base_lr: float | None = option(
        None,
        f"Highest learning rate of a target that learns (default: a quarter of --lr, at most {BASE_LR:g}).",
    )
    head_weight: float | None = option(
        None, f"Weight of the heads' loss beside the target's, with --joint (default: {HEAD_WEIGHT})."
    )
    warm_up_heads: int | None = option(
        None, "Steps in which the heads learn alone, with --joint (default: a fifth of --steps)."
    )

    def __post_init__(self) -> None:
        self._at_least(1, "heads", "head_layers", "head_vocabulary")
        self._at_least(0, "decay", "base_lr", "head_weight", strictly=True)
        self._at_least(0, "warm_up_heads")
        if self.head not in HEADS:
            raise OptionError(f"unknown --head {self.head!r:.40}; choose one of {', '.join(HEADS)}")
        for name in JOINTLY:
            if not self.joint and getattr(self, name) is not None:
                raise OptionError(f"--{name.replace('_', '-')} applies to --joint only, which is not given")
        if self.base_lr is not None and self.base_lr > FASTEST:
            raise OptionError(f"--base-lr must be at most {FASTEST:g}, not {self.base_lr:g}")

    @property
    def changes_target(self) -> bool:
        return self.joint

    def completed(self, loop: LoopOptions) -> MedusaOptions:
        if not self.joint:
            return self
        assert loop.lr is not None
        alone = loop.steps // 5 if self.warm_up_heads is None else self.warm_up_heads
        if alone >= loop.steps:
            raise OptionError(
                f"--warm-up-heads {alone} leaves none of {loop.steps} --steps to the target; leave --joint out, or "
                "change them"
            )
        return replace(
            self,
            base_lr=base_rate(loop.lr) if self.base_lr is None else self.base_lr,
            head_weight=HEAD_WEIGHT if self.head_weight is None else self.head_weight,
            warm_up_heads=alone,
        )
