"""Vision towers that read pictures of any size as units of patches (Qwen2-VL and its successors; arXiv 2409.12191, section
2.1): blocks, angles and hooks.

transformers packs several pictures into one sequence and tells attention their lengths, in Python lists that no trace
follows. A graph reads one picture, or one time step of a video: the whole of it attends to itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.grid import Grid
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.composer import Composer
from ...graphs.hooks import attend, attention_named, replaced, rotary
from ...graphs.weights import WeightStore
from ..common.config_checks import check_common
from ..common.parts import GraphSpec
from .base import Calls, Vision
from .patch_settings import patched_image

RANDOM_UNITS = ((5, 3), (2, 3), (3, 2), (5, 1), (2, 2), (1, 4))
"""(rows, columns) of units of random pictures: most are not a whole number of windows."""

PATH = "model.visual."
"""Of the tower in the whole model."""

Given = Mapping[str, tuple[ir.Value, tuple[str | int, ...]]]
"""Name → (value, shape)."""
Inputs = dict[str, tuple[str, tuple[str | int, ...]]]
"""Name → (dtype, shape) of a graph's inputs."""


class PackedVision(Vision):
    """See the module; `model.visual` of a whole model."""

    scales: ClassVar[bool] = True
    modeling: ClassVar[Any]
    """The module of transformers with the tower."""
    angles: ClassVar[Any]
    """Its module of rotary positions."""
    out_field: ClassVar[str] = "out_hidden_size"
    """What the configuration calls the width of what the tower gives."""

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, "text_config")
        vision, name = checkpoint.config.vision_config, checkpoint.architecture
        check_common(vision, name)
        if self.out_width != width:
            raise UnsupportedModelError(
                f"{name}: vision_config.{self.out_field}={self.out_width} is not the language model's {width}"
            )
        self.grid = Grid(vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        self.width = width
        self.max_embeds = self.settings()["max_pixels"] // self.grid.unit_pixels

    # --- what a tower says ---

    @property
    def block_width(self) -> int:
        """Of hidden states within the tower."""
        return self.config.vision_config.hidden_size

    @property
    def out_width(self) -> int:
        """Of what it gives."""
        return getattr(self.config.vision_config, self.out_field)

    def inputs(self) -> Inputs:
        """Of the graph, beside patches and their positions."""
        return {}

    def tower_inputs(self, pixels: np.ndarray, down: int, across: int) -> dict[str, np.ndarray]:
        """All of the graph's inputs for one picture, or one time step of a video, of `down` × `across` units."""
        raise NotImplementedError

    def embedded(self, calls: Calls, given: Given) -> ir.Value:
        """What enters the first block, [units, patches, `block_width`]."""
        pixels = {"pixel_values": given["pixel_values"]}
        return calls(self.tower.patch_embed, f"{PATH}patch_embed.", pixels, embedded_patches)

    def block(self, calls: Calls, index: int, hidden: Given, given: Given) -> ir.Value:
        """One block over `hidden`: hidden states and angles."""
        return calls(self.tower.blocks[index], f"{PATH}blocks.{index}.", hidden, whole_block)

    def merged(self, calls: Calls, hidden: ir.Value, blocks: list[ir.Value], given: Given) -> ir.Value:
        """`image_rows` [units, `width`] of what the last block gives; `blocks` are what each gives."""
        raise NotImplementedError

    # --- what follows ---

    @property
    def tower(self) -> Any:
        """The hollow tower."""
        return self.model.model.visual

    @property
    def block_shape(self) -> tuple[str | int, ...]:
        """Of hidden states within the tower."""
        return ("units", self.grid.patches, self.block_width)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Attention reaches transformers' blocks by the way of packed sequences."""
        with (
            attention_named(self.attend),
            replaced(self.modeling, "is_flash_attention_requested", lambda *_: True),
            replaced(self.modeling, "get_max_seqlen", lambda *_, **__: None),
            replaced(self.modeling, "apply_rotary_pos_emb_vision", _rotate),
        ):
            yield

    @staticmethod
    def attend(module: nn.Module, *tensors: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """`attend` over the whole picture, whatever lengths of packed sequences say."""
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            options.pop(name, None)
        return attend(module, *tensors, **options)

    def graph(self, store: WeightStore) -> GraphSpec:
        """See `runtime/images/grid.py` for the inputs; `image_rows` [units, `width`]."""
        config, grid = self.config.vision_config, self.grid
        graph, half = Composer("vision", store), self.block_width // config.num_heads // 2
        calls = Calls(graph, self.checkpoint)
        inputs: Inputs = {
            "pixel_values": ("float32", ("units", grid.patches, grid.patch_values)),
            "patch_positions": ("int64", ("units", grid.patches, 2)),
            **self.inputs(),
        }
        given = {name: (graph.input(name, dtype, shape), shape) for name, (dtype, shape) in inputs.items()}
        hidden = self.embedded(calls, given)
        positions = {"positions": given["patch_positions"]}
        angles = calls.several(self.angles(config).eval(), "angles.", positions, _angles, ("cos", "sin"))
        turned = {name: (value, ("units", grid.patches, half)) for name, value in angles.items()}
        blocks = []
        for index in range(len(self.tower.blocks)):
            hidden = self.block(calls, index, {"hidden": (hidden, self.block_shape), **turned}, given)
            blocks.append(hidden)
        image_embeds = self.merged(calls, hidden, blocks, given)
        graph.output("image_rows", image_embeds, "float32", ("units", self.width))
        return GraphSpec("vision", "vision", graph.model())

    def settings(self) -> dict[str, Any]:
        """Qwen2-VL's processor."""
        return patched_image(
            self.checkpoint.image_settings,
            self.grid,
            "qwen2-vl",
            Qwen2VLImageProcessorPil,
            self.checkpoint.max_pixels,
        )

    def random(self, generator: torch.Generator, variant: int = 0) -> tuple[dict[str, torch.Tensor], int]:
        """See `Vision`."""
        down, across = RANDOM_UNITS[variant % len(RANDOM_UNITS)]
        units, merge = down * across, self.grid.merge_size
        pixels = torch.randn(units * self.grid.patches, self.grid.patch_values, generator=generator)
        grid = torch.tensor([[1, down * merge, across * merge]])
        return {"pixel_values": pixels, "image_grid_thw": grid}, units

    def runs(self, tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """See `Vision`; a video is one run a time step."""
        runs, start, merge = [], 0, self.grid.merge_size
        for frames, down, across in tensors["image_grid_thw"].tolist():
            for _ in range(frames):
                pixels = tensors["pixel_values"][start : start + down * across]
                runs.append(self.tower_inputs(pixels, down // merge, across // merge))
                start += down * across
        return runs

    def output(self, model: Any) -> nn.Module:
        """The tower, merger included."""
        return model.model.visual

    def read_embeds(self, output: Any) -> torch.Tensor:
        """See `Vision`."""
        return output.pooler_output


def embedded_patches(module: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
    """`patch_embed`: a convolution whose kernel is its whole input."""
    weight = module.proj.weight.reshape(module.proj.weight.shape[0], -1)
    return (linear(pixel_values, weight, module.proj.bias),)


def whole_block(
    module: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor]:
    """A block that attends to the whole picture."""
    return (run_block(module, hidden, cos, sin, None),)


def run_block(
    module: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Any
) -> torch.Tensor:
    """A block on hidden states [units, patches, E] and angles; attention is told `lengths`."""
    flat = [each.reshape(-1, each.shape[-1]) for each in (hidden, cos, sin)]
    out = module(flat[0], cu_seqlens=lengths, max_seqlen=1, position_embeddings=(flat[1], flat[2]))
    return out.reshape(-1, hidden.shape[1], hidden.shape[2])


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rotary_pos_emb_vision` on [patches, heads, D] by one operator; angles [patches, D / 2]."""
    turned = [
        rotary(x.transpose(0, 1)[None], cos[None], sin[None]).squeeze(0).transpose(0, 1) for x in (q, k)
    ]
    return turned[0], turned[1]


def _angles(module: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    patches = positions.shape[1]
    cos, sin = module(torch.zeros(1), positions.reshape(-1, 2))
    half = cos.shape[-1] // 2  # every angle is written twice
    return cos[:, :half].reshape(-1, patches, half), sin[:, :half].reshape(-1, patches, half)
