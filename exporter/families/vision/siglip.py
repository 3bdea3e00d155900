"""SigLIP's tower (Zhai et al., arXiv 2303.15343): patches with a position each, layers, a norm; no class token."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ....runtime.common.errors import UnsupportedModelError
from .base import Calls


def _embedded(module: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
    patches = module.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    return (patches + module.position_embedding.weight,)


def _layer(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    return (module(hidden, None),)


def siglip_states(calls: Calls, tower: Any, path: str, pixels: ir.Value, pictures: str) -> ir.Value:
    """The tower's last, normed states [pictures, patches, width] of `pixels` [pictures, 3, side, side], whose patches are as
    many as the tower's table has positions, in its order. `path` ends with a dot."""
    side, patches = tower.config.image_size, tower.embeddings.num_positions
    shape = (pictures, patches, tower.config.hidden_size)
    given = {"pixel_values": (pixels, (pictures, 3, side, side))}
    hidden = calls(tower.embeddings, f"{path}embeddings.", given, _embedded)
    for i, layer in enumerate(tower.encoder.layers):
        hidden = calls(layer, f"{path}encoder.layers.{i}.", {"hidden": (hidden, shape)}, _layer)
    return calls(tower.post_layernorm, f"{path}post_layernorm.", {"hidden": (hidden, shape)})


def square_patches(config: Any, architecture: str) -> int:
    """Patches along a side of a SigLIP configuration's picture. Raises UnsupportedModelError where its sizes are no whole
    numbers."""
    for part in ("image_size", "patch_size"):
        size = getattr(config, part)
        if type(size) is not int or size < 1:
            raise UnsupportedModelError(
                f"{architecture}: vision_config.{part}={size!r:.80} is not one number"
            )
    if config.patch_size > config.image_size:
        raise UnsupportedModelError(
            f"{architecture}: vision_config.patch_size={config.patch_size} is above image_size={config.image_size}"
        )
    return config.image_size // config.patch_size
