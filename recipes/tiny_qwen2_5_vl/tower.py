"""The image tower of ``tiny-qwen2.5-vl`` over many pictures of one size at once: pictures and pairs of frames in, rows out.

transformers' own forward calls attention once for every window of every picture; this computes the same (tested) in one call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    apply_rotary_pos_emb_vision,
)
from vlmexport.runtime.images.grid import Grid, patchified
from vlmexport.runtime.images.windows import window_side, windows

SIDE = 224  # pixels
UNITS = 8  # rows of a picture, down and across
ROWS = UNITS**2
WIDTH = 128  # of the language model
FRAMES = 2  # that one patch shows
GRID = Grid(patch_size=14, merge_size=2, temporal_patch_size=FRAMES)
WINDOW = 112  # pixels of a window
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def tower_config() -> Qwen2_5_VLVisionConfig:
    """Four blocks, attention within windows of 4 x 4 rows in the first and third, over the whole picture in the others."""
    return Qwen2_5_VLVisionConfig(
        depth=4,
        hidden_size=96,
        intermediate_size=256,
        num_heads=3,
        out_hidden_size=WIDTH,
        fullatt_block_indexes=[1, 3],
        window_size=WINDOW,
        patch_size=GRID.patch_size,
        spatial_merge_size=GRID.merge_size,
        temporal_patch_size=FRAMES,
        tokens_per_second=2,
        initializer_range=0.06,  # near width ** -0.5; 0.02 is for 1280
    )


def build_tower(seed: int) -> Any:
    """A freshly initialised tower, fp32, the same for the same seed."""
    torch.manual_seed(seed)
    return Qwen2_5_VisionTransformerPretrainedModel._from_config(tower_config())


def patches(frames: np.ndarray) -> Tensor:
    """uint8 (B, 2, side, side, 3) to patches as the processor lays them out, float32 [B, 256, 1176]."""
    laid = np.stack([patchified(pair, GRID) for pair in frames.transpose(0, 1, 4, 2, 3)])
    mean, std = (torch.tensor(v).repeat_interleave(GRID.patch_values // 3) for v in (MEAN, STD))
    return torch.from_numpy(laid).float().div_(255).sub_(mean).div_(std)


@lru_cache(maxsize=1)
def _layout() -> tuple[Tensor, Tensor, Tensor]:
    """The order of patches [256] by windows, their rows and columns [256, 2], and the order of rows [64] after it."""
    numbers = np.arange(ROWS * GRID.patches, dtype=np.float32)[:, None]
    arrays = windows(numbers, UNITS, UNITS, GRID, WINDOW)
    places = torch.from_numpy(arrays["patch_positions"]).reshape(-1, 2)
    return (
        torch.from_numpy(arrays["pixel_values"]).flatten().long(),
        places,
        torch.from_numpy(arrays["unit_order"]),
    )


def encode(tower: Any, pixels: Tensor) -> Tensor:
    """Rows [B, 64, width] of patches [B, 256, 1176]."""
    order, places, reading = (part.to(pixels.device) for part in _layout())
    hidden = F.linear(pixels[:, order], tower.patch_embed.proj.weight.flatten(1))
    angles = tower.rotary_pos_emb(hidden, places)
    whole = tower.config.fullatt_block_indexes
    for number, block in enumerate(tower.blocks):
        span = hidden.shape[1] if number in whole else window_side(WINDOW, GRID) ** 2 * GRID.patches
        hidden = hidden + _attend(block.attn, block.norm1(hidden), angles, span)
        hidden = hidden + block.mlp(block.norm2(hidden))
    image_embeds = tower.merger(hidden.flatten(0, 1)).view(len(pixels), ROWS, -1)
    return image_embeds[:, reading]


def _attend(module: Any, hidden: Tensor, angles: tuple[Tensor, Tensor], span: int) -> Tensor:
    """Attention within runs of `span` patches; [B, patches, width] in and out."""
    size = hidden.shape[:2]
    q, k, v = module.qkv(hidden).unflatten(-1, (3, module.num_heads, -1)).unbind(2)
    q, k = apply_rotary_pos_emb_vision(q, k, *angles)
    q, k, v = (x.flatten(0, 1).unflatten(0, (-1, span)).transpose(1, 2) for x in (q, k, v))
    seen = F.scaled_dot_product_attention(q, k, v, scale=module.scaling)
    return module.proj(seen.transpose(1, 2).reshape(*size, -1))
