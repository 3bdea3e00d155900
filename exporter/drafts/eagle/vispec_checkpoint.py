"""ViSpec checkpoints as they are published (github.com/KangJialiang/ViSpec): those of an EAGLE layer, and beside its tensors
the adaptor's and the mixer's.

`imadpt.q [queries, heads, head_dim]`, `imadpt.{k,v}_proj.weight [E, E]` (with `.bias` where `qkv_bias` of `config.json`
says so), `imadpt.o_proj.weight [E, E]`, `img_fc.weight [E, 2E]`, `img_fc.bias [E]`. The number of queries is read from
the first of them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ....runtime.common.errors import ExportError, OptionError
from ..common.published import filled
from .eagle_checkpoint import ADAPTOR, has_one_layer, names_in, read_layer
from .vispec_network import VispecConfig, VispecNetwork

OWN = ("imadpt.", "img_fc.")
"""Prefixes of what an EAGLE layer has not."""


def is_published(folder: Path) -> bool:
    """Whether `folder` looks like such a checkpoint."""
    return has_one_layer(folder) and ADAPTOR in names_in(folder)


def read_published(folder: Path) -> VispecNetwork:
    """The layer and its adaptor in float32. Raises ExportError naming the first thing that does not fit."""
    path, layer, tensors = read_layer(folder, "ViSpec")
    queries = tensors[ADAPTOR]
    if queries.dim() != 3 or queries.shape[1] * queries.shape[2] != layer.hidden_size:
        raise ExportError(
            f"{path}: {ADAPTOR} has shape {list(queries.shape)}, not [queries, heads, head_dim] of {layer.hidden_size} units"
        )
    try:
        config = VispecConfig(layer, queries.shape[1], queries.shape[0], "imadpt.k_proj.bias" in tensors)
    except OptionError as error:
        raise ExportError(f"{path}: {error}") from error
    with torch.device("meta"):
        network = VispecNetwork(config)
    named = {name if name.startswith(OWN) else f"layer.{name}": value for name, value in tensors.items()}
    return filled(network, named, path, "one layer of ViSpec")
