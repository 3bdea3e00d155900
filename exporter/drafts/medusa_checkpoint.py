"""Medusa checkpoints as they are published (github.com/FasterDecoding/Medusa): `config.json` with `medusa_num_heads`, and
`medusa_lm_head.safetensors` or `.pt`.

Keys are `{head}.{layer}.linear.weight [E, E]`, `.bias [E]` and `{head}.{layers}.weight [V, E]`; newer code writes
`medusa_head.` before each. The oldest trainer left the projection out: such heads share the target's LM head. Where a
checkpoint has several layers their weights are tied, and stored for each. Nothing in a folder is trusted: `.pt` files are
read with `weights_only=True`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...runtime.errors import ExportError, OptionError
from .medusa_network import MedusaConfig, MedusaHeads
from .published import filled, find_weights, read_config, read_weights

CONFIG = "config.json"
WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PREFIX = "medusa_head."


def is_published(folder: Path) -> bool:
    """Whether `folder` looks like such a checkpoint."""
    return find_weights(folder, WEIGHTS) is not None and (folder / CONFIG).is_file()


def read_published(folder: Path) -> tuple[MedusaHeads, dict[str, Any]]:
    """(the heads in float32, `config.json`). Raises ExportError naming the first thing that does not fit."""
    document = read_config(folder / CONFIG)
    path = find_weights(folder, WEIGHTS)
    assert path is not None, "ask is_published first"
    tensors = {name.removeprefix(PREFIX): value for name, value in read_weights(path).items()}
    heads: Any = document.get("medusa_num_heads")
    layers: Any = document.get("medusa_num_layers", 1)
    first = tensors.get("0.0.linear.weight")
    if first is None or first.dim() != 2:
        raise ExportError(f"{path}: there is no matrix 0.0.linear.weight, so these are no Medusa heads")
    table = tensors.get(f"0.{layers}.weight")
    shared = table is None
    try:
        config = MedusaConfig(
            first.shape[0], None if shared else table.shape[0], heads, layers, "shared" if shared else "own"
        )
    except OptionError as error:
        raise ExportError(f"{folder / CONFIG}: {error}") from error
    with torch.device("meta"):
        network = MedusaHeads(config)
    return filled(network, tensors, path, "the heads that config.json names"), document
