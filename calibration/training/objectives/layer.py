"""What the trainings of all layers that draft share: the layer's shape, its learning rate, and noise on what it reads."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from ....exporter.drafts.eagle_network import EagleConfig
from ....runtime.errors import OptionError
from .. import losses
from .base import Counts, LearnedTarget
from .layer_options import LayerOptions
from .medusa import frequent

C = TypeVar("C", bound=EagleConfig)

PUBLISHED_LENGTH = 512
"""The published code divides its noise by a text's positions and multiplies it by so many."""


def layer_config(
    kind: type[C], options: LayerOptions, target: LearnedTarget, counts: Counts | None, **more: Any
) -> tuple[C, Tensor | None]:
    """(shape of a layer for `target`, ids of its trimmed vocabulary); `more` are fields of that kind of shape alone.

    Raises:
        OptionError: heads that do not fit the width.
    """
    vocabulary, width = target.lm_head.weight.shape
    trimmed, d2t = None, None
    if options.head == "trimmed":
        assert counts is not None, "the layer needs to know which tokens are frequent"
        d2t = frequent(counts(), options.head_vocabulary)
        trimmed = len(d2t)
    shape = target.decoder
    heads = options.attention_heads or shape.num_heads
    if width % heads or width // heads % 2:
        raise OptionError(f"--attention-heads {heads} does not divide the width {width} into pairs")
    config = kind(
        width,
        vocabulary,
        heads,
        heads if heads % shape.num_kv_heads else shape.num_kv_heads,
        width // heads,
        options.feed_forward or -(-8 * width // 3 // 64) * 64,
        rope_theta=options.rotary_base or target.family.rotary_base or 10_000.0,
        head=options.head,
        trimmed=trimmed,
        **more,
    )
    return config, d2t


def layer_rate(hidden_size: int) -> float:
    """The learning rate for a layer of this width: of a small one more than the published 3e-5, which is for 4,096 units and
    hundreds of thousands of steps; in inverse proportion to the width, between 3e-5 and 1e-3."""
    return min(1e-3, max(3e-5, 1e-3 * 128 / hidden_size))


def noisy(features: Tensor, most: float) -> Tensor:
    """`features` [B, T, E] with uniform noise of at most `most` in texts up to the published length, else less."""
    return losses.with_noise(features, 2 * most * min(1.0, PUBLISHED_LENGTH / features.shape[1]))
