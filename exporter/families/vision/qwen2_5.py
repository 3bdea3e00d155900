"""The vision tower of Qwen2.5-VL (Bai et al., arXiv 2502.13923, section 2.1.1): pictures of any size, attention within
windows in most blocks, over the whole picture in a few; four patches become one embedding.

A *unit* is the square of patches that becomes one embedding. The host puts units into the order of their windows, so that a
window is a run of units; windows at the right and lower edge are smaller, and are padded for attention alone. Layout:
`runtime/images/windows.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import embedding, linear
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.windows import Grid, windows
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.composer import Composer
from ...graphs.hooks import attend, attention, attention_named, replaced, rotary
from ...graphs.weights import WeightStore
from ..common.config_checks import check_common
from ..common.parts import GraphSpec
from .base import Calls, Vision
from .patch_settings import patched_image, sampled_video

RANDOM_UNITS = ((5, 3), (2, 3), (3, 2), (5, 1), (2, 2), (1, 4))
"""(rows, columns) of units of random pictures: most are not a whole number of windows."""


@dataclass(frozen=True)
class _Windows:
    """What a windowed block's attention needs: units of each window (padded), what is visible, and where each unit is."""

    units: torch.Tensor
    mask: torch.Tensor
    places: torch.Tensor
    patches: int


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rotary_pos_emb_vision` on [patches, heads, D] by one operator; angles [patches, D / 2]."""
    turned = [
        rotary(x.transpose(0, 1)[None], cos[None], sin[None]).squeeze(0).transpose(0, 1) for x in (q, k)
    ]
    return turned[0], turned[1]


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`attend`, within windows where `cu_seq_lens_q` is a `_Windows`; [1, heads, patches, D] in, [1, patches, heads, D] out."""
    if not isinstance(cu_seq_lens_q, _Windows):
        return attend(module, query, key, value, attention_mask, scaling, dropout, **options)
    spans, heads, size = cu_seq_lens_q, query.shape[1], query.shape[-1]
    window = spans.units.shape[1] * spans.patches

    def split(num_embeds: torch.Tensor) -> torch.Tensor:
        by_unit = num_embeds.squeeze(0).transpose(0, 1).reshape(-1, spans.patches * heads * size)
        return embedding(spans.units, by_unit).reshape(-1, window, heads, size).transpose(1, 2)

    assert scaling is not None
    out = attention(split(query), split(key), split(value), spans.mask, float(scaling)).transpose(1, 2)
    by_unit = embedding(spans.places, out.reshape(-1, spans.patches * heads * size))
    return by_unit.reshape(1, -1, heads, size), None


def _embedded(module: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
    # A convolution whose kernel is its whole input.
    weight = module.proj.weight.reshape(module.proj.weight.shape[0], -1)
    return (linear(pixel_values, weight),)


def _angles(module: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    patches = positions.shape[1]
    cos, sin = module(torch.zeros(1), positions.reshape(-1, 2))
    half = cos.shape[-1] // 2  # every angle is written twice
    return cos[:, :half].reshape(-1, patches, half), sin[:, :half].reshape(-1, patches, half)


def _whole(module: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor]:
    return (_block(module, hidden, cos, sin, None),)


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
    return (_block(module, hidden, cos, sin, spans),)


def _block(
    module: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spans: Any
) -> torch.Tensor:
    flat = [each.reshape(-1, each.shape[-1]) for each in (hidden, cos, sin)]
    out = module(flat[0], cu_seqlens=spans, max_seqlen=1, position_embeddings=(flat[1], flat[2]))
    return out.reshape(-1, hidden.shape[1], hidden.shape[2])


def _merged(module: Any, hidden: torch.Tensor, unit_order: torch.Tensor) -> tuple[torch.Tensor]:
    normed = module.ln_q(hidden)
    image_embeds = module.mlp(normed.reshape(-1, module.hidden_size))
    return (embedding(unit_order, image_embeds),)


class Qwen2_5Vision(Vision):
    """See the module; `model.visual` of a Qwen2_5_VLForConditionalGeneration."""

    scales: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, "text_config")
        vision, name = checkpoint.config.vision_config, checkpoint.architecture
        check_common(vision, name)
        if vision.out_hidden_size != width:
            raise UnsupportedModelError(
                f"{name}: vision_config.out_hidden_size={vision.out_hidden_size} is not the language model's {width}"
            )
        self.grid = Grid(
            vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size, vision.window_size
        )
        self.width = width
        described = self.settings()
        self.max_embeds = described["max_pixels"] // self.grid.unit_pixels

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Attention within windows reaches transformers' blocks by the way of packed sequences."""
        with (
            attention_named(_attend),
            replaced(modeling_qwen2_5_vl, "is_flash_attention_requested", lambda *_: True),
            replaced(modeling_qwen2_5_vl, "get_max_seqlen", lambda *_, **__: None),
            replaced(modeling_qwen2_5_vl, "apply_rotary_pos_emb_vision", _rotate),
        ):
            yield

    def graph(self, store: WeightStore) -> GraphSpec:
        """See `runtime/images/windows.py` for the inputs; `image_rows` [units, width]."""
        config, grid = self.config.vision_config, self.grid
        tower, path = self.model.model.visual, "model.visual."
        graph, half = Composer("vision", store), config.hidden_size // config.num_heads // 2
        calls = Calls(graph, self.checkpoint)
        window = grid.window_units * grid.patches
        shapes = {
            "pixel_values": ("float32", ("units", grid.patches, grid.patch_values)),
            "patch_positions": ("int64", ("units", grid.patches, 2)),
            "window_units": ("int64", ("windows", grid.window_units)),
            "window_mask": ("bool", ("windows", 1, window, window)),
            "unit_places": ("int64", ("units",)),
            "unit_order": ("int64", ("units",)),
        }
        given = {name: (graph.input(name, dtype, shape), shape) for name, (dtype, shape) in shapes.items()}
        pixels = {"pixel_values": given["pixel_values"]}
        hidden = calls(tower.patch_embed, f"{path}patch_embed.", pixels, _embedded)
        rotary_module = modeling_qwen2_5_vl.Qwen2_5_VLVisionRotaryEmbedding(config).eval()
        positions = {"positions": given["patch_positions"]}
        angles = calls.several(rotary_module, "angles.", positions, _angles, ("cos", "sin"))
        dims = ("units", grid.patches, config.hidden_size)
        turned = {name: (value, ("units", grid.patches, half)) for name, value in angles.items()}
        spans = {name: given[name] for name in ("window_units", "window_mask", "unit_places")}
        for i, block in enumerate(tower.blocks):
            whole = i in config.fullatt_block_indexes
            values: Mapping[str, Any] = {"hidden": (hidden, dims), **turned, **({} if whole else spans)}
            hidden = calls(block, f"{path}blocks.{i}.", values, _whole if whole else _windowed)
        values = {"hidden": (hidden, dims), "unit_order": given["unit_order"]}
        merged = calls(tower.merger, f"{path}merger.", values, _merged)
        graph.output("image_rows", merged, "float32", ("units", self.width))
        return GraphSpec("vision", "vision", graph.model())

    def settings(self) -> dict[str, Any]:
        """Qwen2-VL's processor, and the windows of the tower."""
        most = self.checkpoint.max_pixels
        described = patched_image(
            self.checkpoint.image_settings, self.grid, "qwen2-vl", Qwen2VLImageProcessorPil, most
        )
        config = self.checkpoint.config
        video = sampled_video(
            self.checkpoint.video_settings,
            described,
            config.video_token_id,
            config.vision_config.tokens_per_second,
            most,
        )
        return {**described, "window_size": self.grid.window_size, "video": video}

    def random(self, generator: torch.Generator, variant: int = 0) -> tuple[dict[str, torch.Tensor], int]:
        """See `Vision`."""
        down, across = RANDOM_UNITS[variant % len(RANDOM_UNITS)]
        units = down * across
        pixels = torch.randn(units * self.grid.patches, self.grid.patch_values, generator=generator)
        merge = self.grid.merge_size
        return {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, down * merge, across * merge]]),
        }, units

    def runs(self, tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """See `Vision`; a picture's patches are put into the order of windows, a video's are one run a time step."""
        runs, start = [], 0
        for frames, down, across in tensors["image_grid_thw"].tolist():
            for _ in range(frames):
                pixels = tensors["pixel_values"][start : start + down * across]
                merge = self.grid.merge_size
                runs.append(windows(pixels, down // merge, across // merge, self.grid))
                start += down * across
        return runs

    def output(self, model: Any) -> nn.Module:
        """The tower, merger included."""
        return model.model.visual

    def read_embeds(self, output: Any) -> torch.Tensor:
        """See `Vision`."""
        return output.pooler_output
