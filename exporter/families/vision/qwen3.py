"""The vision tower of Qwen3-VL and Qwen3.5 (arXiv 2511.21631): attention over the whole picture, a square table of positions that is
resampled to the picture; four patches become one embedding, after the last block and after some in the middle (DeepStack,
arXiv 2406.04334).

Which entries of the table a patch takes, and how much of each, says the host (`runtime/images/position_table.py`).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.nn.functional import embedding
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.families.qwen3_vl import tower_inputs
from ...checkpoint.checkpoint import Checkpoint
from .base import Calls
from .packed import PATH, Given, Inputs, PackedVision, embedded_patches
from .patch_settings import timed_video


def _embedded(
    module: Any, pixel_values: torch.Tensor, table_indices: torch.Tensor, table_weights: torch.Tensor
) -> tuple[torch.Tensor]:
    (hidden,) = embedded_patches(module.patch_embed, pixel_values)
    entries = embedding(table_indices, module.pos_embed.weight)
    return (hidden + torch.matmul(table_weights[..., None, :], entries).squeeze(-2),)


def _merged(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    return (module(hidden),)


class Qwen3Vision(PackedVision):
    """See the module; `model.visual` of a Qwen3VLForConditionalGeneration."""

    modeling: ClassVar[Any] = modeling_qwen3_vl
    angles: ClassVar[Any] = modeling_qwen3_vl.Qwen3VLVisionRotaryEmbedding

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        vision, name = checkpoint.config.vision_config, checkpoint.architecture
        taps: list[int] = list(getattr(vision, "deepstack_visual_indexes", ()))
        if sorted(set(taps)) != taps or (taps and not 0 <= taps[0] <= taps[-1] < vision.depth):
            raise UnsupportedModelError(
                f"{name}: deepstack_visual_indexes {taps!r:.80} are not rising numbers of blocks below {vision.depth}; "
                "correct config.json"
            )
        self.taps = taps
        """Blocks after which embeddings for the language model's first layers are taken."""
        self.table_side = math.isqrt(vision.num_position_embeddings)
        if self.table_side**2 != vision.num_position_embeddings:
            raise UnsupportedModelError(
                f"{name}: num_position_embeddings={vision.num_position_embeddings} is no square; correct config.json"
            )
        super().__init__(checkpoint, width)
        self.width = width * (1 + len(taps))

    def inputs(self) -> Inputs:
        """See `runtime/images/position_table.py`."""
        shape = ("units", self.grid.patches, 4)
        return {"table_indices": ("int64", shape), "table_weights": ("float32", shape)}

    def tower_inputs(self, pixels: np.ndarray, down: int, across: int) -> dict[str, np.ndarray]:
        """See `PackedVision`."""
        return tower_inputs(pixels, down, across, self.grid, self.table_side)

    def embedded(self, calls: Calls, given: Given) -> ir.Value:
        """See `PackedVision`."""
        first = nn.ModuleDict({"patch_embed": self.tower.patch_embed, "pos_embed": self.tower.pos_embed})
        entering = {name: given[name] for name in ("pixel_values", "table_indices", "table_weights")}
        return calls(first, PATH, entering, _embedded)

    def merged(self, calls: Calls, hidden: ir.Value, blocks: list[ir.Value], given: Given) -> ir.Value:
        """See `PackedVision`; what enters the decoder, then what is added behind each of its first layers."""
        rows = [calls(self.tower.merger, f"{PATH}merger.", {"hidden": (hidden, self.block_shape)}, _merged)]
        for number, tap in enumerate(self.taps):
            merger, path = self.tower.deepstack_merger_list[number], f"{PATH}deepstack_merger_list.{number}."
            rows.append(calls(merger, path, {"hidden": (blocks[tap], self.block_shape)}, _merged))
        return calls.graph.node("Concat", rows, "rows", axis=-1) if self.taps else rows[0]

    def settings(self) -> dict[str, Any]:
        """Qwen2-VL's processor, and the side of the table; videos with times."""
        described, checkpoint = super().settings(), self.checkpoint
        token = checkpoint.config.video_token_id
        video = timed_video(checkpoint.video_settings, described, token, checkpoint.max_pixels)
        return {**described, "table_side": self.table_side, "video": video}

    def read_embeds(self, output: Any) -> torch.Tensor:
        """See `Vision`."""
        return torch.cat([output.pooler_output, *output.deepstack_features], -1)


class Qwen3_5Vision(Qwen3Vision):
    """The same of a Qwen3_5ForConditionalGeneration, without DeepStack."""

    modeling: ClassVar[Any] = modeling_qwen3_5
    angles: ClassVar[Any] = modeling_qwen3_5.Qwen3_5VisionRotaryEmbedding

    def read_embeds(self, output: Any) -> torch.Tensor:
        """See `Vision`."""
        return output.pooler_output
