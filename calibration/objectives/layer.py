"""What the trainings of all layers that draft share: the layer's shape, its learning rate, noise on what it reads, and the draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from ...exporter.drafts.eagle.eagle_network import EagleConfig
from ...exporter.drafts.eagle.layer_draft import LayerDraft
from ...runtime.common.errors import OptionError
from . import losses
from .base import Counts, LearnedTarget, Objective
from .layer_options import LayerOptions, PlacedLayerOptions
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


def placed_by(options: PlacedLayerOptions, target: LearnedTarget) -> dict[str, Any]:
    """What a layer's shape says of positions with axes: with the model's own, a third of a head's angles turn with each axis, in
    turn, as Qwen3-VL's (arXiv 2511.21631).

    Raises:
        OptionError: the model's positions have one axis.
    """
    if options.positions == "counted":
        return {}
    if target.decoder.position != "mrope":
        raise OptionError(
            f"--positions model: {target.name} has no positions with three axes (M-RoPE); leave it out"
        )
    heads = options.attention_heads or target.decoder.num_heads
    angles = target.decoder.hidden_size // heads // 2
    third = angles // 3
    return {"mrope_section": (angles - 2 * third, third, third), "mrope_interleaved": True}


class LayerObjective(Objective):
    """One layer that drafts, in training."""

    draft_class: ClassVar[type[LayerDraft]]
    target: dict[str, Any]

    def score(self, means: Mapping[str, float]) -> float:
        """How often the first drafted token is the target's."""
        return means["hit1"]

    def learning_rate(self, hidden_size: int) -> float:
        """1e-2 at a width of 128, the best of those that were tried there (docs/how-to/training-runs.md), and in inverse proportion to the width:
        3e-4 at 4,096, what a Llama of that width is pretrained with. The published 3e-5 is for hundreds of thousands of steps. ViSpec's
        authors give one rate for both of its stages."""
        return min(1e-2, 1e-2 * 128 / hidden_size)

    def draft(self, provenance: Mapping[str, Any], evaluation: Mapping[str, Any]) -> LayerDraft:
        return self.draft_class(
            network=self.network,
            target=self.target,
            provenance=dict(provenance),
            evaluation=dict(evaluation),
        )


def noisy(features: Tensor, most: float) -> Tensor:
    """`features` [B, T, E] with uniform noise of at most `most` in texts up to the published length, else less."""
    return losses.with_noise(features, 2 * most * min(1.0, PUBLISHED_LENGTH / features.shape[1]))
