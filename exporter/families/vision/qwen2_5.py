"""The vision tower of Qwen2.5-VL (Bai et al., arXiv 2502.13923, section 2.1.1): attention within windows in most blocks, over
the whole picture in a few; four patches become one embedding.

The host puts units into the order of their windows, so that a window is a run of units; windows at the right and lower edge are
smaller, and are padded for attention alone. Layout: `runtime/images/windows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.nn.functional import embedding
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from ....runtime.images.windows import window_side, windows
from ...graphs.hooks import attention
from .base import Calls
from .packed import PATH, Given, Inputs, PackedVision, run_block, whole_block
from .patch_settings import sampled_video


@dataclass(frozen=True)
class _Windows:
    """What a windowed block's attention needs: units of each window (padded), what is visible, and where each unit is."""

    units: torch.Tensor
    mask: torch.Tensor
    places: torch.Tensor
    patches: int


def _windowed(
    module: Any,
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window_units: torch.Tensor,
    window_mask: torch.Tensor,
    unit_places: torch.Tensor,
) -> tuple[torch.Tensor]:
    spans = _Windows(window_units, window_mask, unit_places, hidden.shape[1])
    return (run_block(module, hidden, cos, sin, spans),)


def _merged(module: Any, hidden: torch.Tensor, unit_order: torch.Tensor) -> tuple[torch.Tensor]:
    normed = module.ln_q(hidden)
    image_embeds = module.mlp(normed.reshape(-1, module.hidden_size))
    return (embedding(unit_order, image_embeds),)


class Qwen2_5Vision(PackedVision):
    """See the module; `model.visual` of a Qwen2_5_VLForConditionalGeneration."""

    modeling: ClassVar[Any] = modeling_qwen2_5_vl
    angles: ClassVar[Any] = modeling_qwen2_5_vl.Qwen2_5_VLVisionRotaryEmbedding

    def inputs(self) -> Inputs:
        """See `runtime/images/windows.py`."""
        units = window_side(self._window_size, self.grid) ** 2
        patches = units * self.grid.patches
        return {
            "window_units": ("int64", ("windows", units)),
            "window_mask": ("bool", ("windows", 1, patches, patches)),
            "unit_places": ("int64", ("units",)),
            "unit_order": ("int64", ("units",)),
        }

    @property
    def _window_size(self) -> int:
        return self.config.vision_config.window_size

    def tower_inputs(self, pixels: np.ndarray, down: int, across: int) -> dict[str, np.ndarray]:
        """See `PackedVision`; a picture's patches are put into the order of windows."""
        return windows(pixels, down, across, self.grid, self._window_size)

    @staticmethod
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Within windows where `cu_seq_lens_q` is a `_Windows`; [1, heads, patches, D] in, [1, patches, heads, D] out."""
        spans, heads, size = options.get("cu_seq_lens_q"), query.shape[1], query.shape[-1]
        if not isinstance(spans, _Windows):
            return PackedVision.attend(module, query, key, value, attention_mask, **options)
        window = spans.units.shape[1] * spans.patches

        def split(num_embeds: torch.Tensor) -> torch.Tensor:
            by_unit = num_embeds.squeeze(0).transpose(0, 1).reshape(-1, spans.patches * heads * size)
            return embedding(spans.units, by_unit).reshape(-1, window, heads, size).transpose(1, 2)

        scaling = float(options["scaling"])
        out = attention(split(query), split(key), split(value), spans.mask, scaling).transpose(1, 2)
        by_unit = embedding(spans.places, out.reshape(-1, spans.patches * heads * size))
        return by_unit.reshape(1, -1, heads, size), None

    def block(self, calls: Calls, index: int, hidden: Given, given: Given) -> ir.Value:
        """See `PackedVision`."""
        block, path = self.tower.blocks[index], f"{PATH}blocks.{index}."
        if index in self.config.vision_config.fullatt_block_indexes:
            return calls(block, path, hidden, whole_block)
        spans = {name: given[name] for name in ("window_units", "window_mask", "unit_places")}
        return calls(block, path, {**hidden, **spans}, _windowed)

    def merged(self, calls: Calls, hidden: ir.Value, blocks: list[ir.Value], given: Given) -> ir.Value:
        """See `PackedVision`."""
        values = {"hidden": (hidden, self.block_shape), "unit_order": given["unit_order"]}
        return calls(self.tower.merger, f"{PATH}merger.", values, _merged)

    def settings(self) -> dict[str, Any]:
        """Qwen2-VL's processor, and the windows of the tower."""
        described, checkpoint = super().settings(), self.checkpoint
        config = checkpoint.config
        video = sampled_video(
            checkpoint.video_settings,
            described,
            config.video_token_id,
            config.vision_config.tokens_per_second,
            checkpoint.max_pixels,
        )
        return {**described, "window_size": self._window_size, "video": video}
