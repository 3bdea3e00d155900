"""Medusa checkpoints as they are published (github.com/FasterDecoding/Medusa): `config.json`, and
`medusa_lm_head.safetensors` or `.pt`. How many heads there are, and layers in each, is counted in the tensors: the first
published heads say `medusa_num_heads: 2` of five, and Medusa-2's `config.json` is the target's own.

Keys are `{head}.{layer}.linear.weight [E, E]`, `.bias [E]` and `{head}.{layers}.weight [V, E]`; newer code writes
`medusa_head.` before each. The oldest trainer left the projection out: such heads share the target's LM head. Where a
checkpoint has several layers their weights are tied, and stored for each. Nothing in a folder is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....runtime.common.errors import ExportError, OptionError
from ...checkpoint.small_files import read_weights
from ..common.published import filled, find_weights, matrix, read_config
from .medusa_network import MedusaConfig, MedusaHeads

CONFIG = "config.json"
WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PREFIX = "medusa_head."
_LAYER = re.compile(r"(\d{1,4})\.(\d{1,4})\.linear\.weight")


def is_published(folder: Path) -> bool:
    """Whether `folder` looks like such a checkpoint."""
    return find_weights(folder, WEIGHTS) is not None and (folder / CONFIG).is_file()


def read_published(folder: Path) -> tuple[MedusaHeads, dict[str, Any], list[str]]:
    """(the heads in float32, `config.json`, lines for the user). Raises ExportError naming the first thing that does not
    fit."""
    document = read_config(folder / CONFIG)
    path = find_weights(folder, WEIGHTS)
    assert path is not None, "ask is_published first"
    tensors = {name.removeprefix(PREFIX): value for name, value in read_weights(path).items()}
    heads, layers = _counts(tensors)
    first = matrix(path, tensors, "0.0.linear.weight", "Medusa heads")
    own = f"0.{layers}.weight"
    shared = own not in tensors
    words = None if shared else matrix(path, tensors, own, "Medusa heads").shape[0]
    try:
        config = MedusaConfig(first.shape[0], words, heads, layers, "shared" if shared else "own")
    except OptionError as error:
        raise ExportError(f"{folder / CONFIG}: {error}") from error
    with torch.device("meta"):
        network = MedusaHeads(config)
    told = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    notices = [
        f"{folder / CONFIG} says {name} {document[name]!r:.40}, {path.name} holds {count}: those are used."
        for name, count in told.items()
        if document.get(name) is not None and str(document[name]) != str(count)
    ]
    return filled(network, tensors, path, f"{heads} heads of {layers} layers"), document, notices


def _counts(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """(heads, residual layers of each), of which the names tell."""
    matches = [match for name in tensors if (match := _LAYER.fullmatch(name))]
    return tuple(1 + max((int(m[part]) for m in matches), default=0) for part in (1, 2))  # type: ignore[return-value]
