"""EAGLE-1 and EAGLE-2 checkpoints as they are published (github.com/SafeAILab/EAGLE), in and out: `config.json` of a Llama with
one layer, and `model.safetensors` or `pytorch_model.bin`. vLLM and SGLang read them, too.

Keys are `fc.weight [E, 2E]` (with `fc.bias`), `layers.0.self_attn.{q,k,v,o}_proj.weight` (queries, keys and values of a
draft for Qwen2 with `.bias`),
`layers.0.mlp.{gate,up,down}_proj.weight` and `layers.0.post_attention_layernorm.weight`, sometimes below `model.`; there is
no norm before attention or at the end, and no LM head: it is the target's. `embed_tokens.weight [V, E]` is a copy of the
target's table, which is read in its place, and is not written. `config.json` has the target's V; it says nothing else of the
target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....runtime.common.errors import ExportError
from ...checkpoint.small_files import read_weights
from ..common.published import (
    CONFIG,
    TABLE,
    WEIGHTS,
    filled,
    find_weights,
    layer_shape,
    matrix,
    mrope_options,
    read_config,
    read_names,
)
from ..common.verifier import Verifier
from .eagle_network import EagleConfig, EagleNetwork
from .llama_config import llama_config

EAGLE = "eagle"
"""The format's name in `early_checks.FORMS`."""
PREFIX = "model."
ADAPTOR = "imadpt.q"
"""A tensor that only ViSpec's checkpoints have (`vispec_checkpoint`)."""
WIDE = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
"""Tensors that only EAGLE-3's have (`eagle3_checkpoint`)."""
BUFFERS = tuple(
    f"rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")
)
"""Older versions of transformers stored the frequencies of rotary positions, which follow from `config.json`."""


def is_published(folder: Path) -> bool:
    """Whether `folder` looks like such a checkpoint: a Llama of one layer, without more that it reads."""
    return has_one_layer(folder) and not names_in(folder) & {ADAPTOR, *WIDE}


def has_one_layer(folder: Path) -> bool:
    """Whether it is that of a Llama of one layer."""
    path = folder / CONFIG
    if find_weights(folder, WEIGHTS) is None or not path.is_file():
        return False
    return read_config(path).get("num_hidden_layers") == 1


def names_in(folder: Path) -> set[str]:
    """Names of the checkpoint's tensors, without the prefix; none where the file cannot be read."""
    path = find_weights(folder, WEIGHTS)
    return set() if path is None else {name.removeprefix(PREFIX) for name in read_names(path)}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors, names without the prefix. Raises ExportError where the file cannot be read."""
    tensors = {name.removeprefix(PREFIX): value for name, value in read_weights(path).items()}
    return {name: value for name, value in tensors.items() if not name.endswith(BUFFERS)}


def read_published(folder: Path) -> EagleNetwork:
    """The layer in float32. Raises ExportError naming the first thing that does not fit."""
    axes = mrope_options(folder / CONFIG, read_config(folder / CONFIG))
    path, config, tensors = read_layer(folder, "EAGLE-1 or EAGLE-2", **axes)
    with torch.device("meta"):
        network = EagleNetwork(config)
    return filled(network, tensors, path, "one layer of EAGLE-1 or EAGLE-2")


def read_layer(folder: Path, what: str, **axes: Any) -> tuple[Path, EagleConfig, dict[str, Tensor]]:
    """(file of the weights, shape of the layer, its tensors and whatever lies beside them) of a checkpoint of `what`, whose
    positions have one axis, or as `axes` say (`mrope_options`).

    Raises ExportError naming the first thing that does not fit.
    """
    document = read_config(folder / CONFIG)
    path = find_weights(folder, WEIGHTS)
    assert path is not None, "ask is_published first"
    tensors = read_tensors(path)
    tensors.pop(TABLE, None)  # read in its place is the target's, however many rows of padding this one has
    matrix(path, tensors, "fc.weight", f"layer of {what}")
    config = layer_shape(
        folder / CONFIG,
        document,
        tensors,
        "layers.0.",
        EagleConfig,
        fc_bias="fc.bias" in tensors,
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        **axes,
    )
    return path, config, tensors


def authors_checkpoint(network: EagleNetwork, verifier: Verifier) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(`config.json`, tensors) of a layer in the authors' layout. ExportError for one with an LM head of its own.

    `bias` is that of `fc`, by the authors' word; `qkv_bias` is vLLM's for what a draft for Qwen2 has.
    """
    config = network.config
    if config.head != "shared":
        raise ExportError(
            f"the layout of EAGLE's authors has no place for this draft's LM head ({config.head}), it takes the target's; train "
            "with --head shared"
        )
    axes = "slots" if config.mrope_section is None else "mrope"
    document = llama_config(config, verifier) | {
        "bias": config.fc_bias,
        "qkv_bias": config.qkv_bias,
        "torch_dtype": "float32",
        "trained_positions": axes,
    }
    return document, dict(network.state_dict())


def reader_notices(config: EagleConfig) -> list[str]:
    """Lines for the user where a program that reads the layout computes otherwise than this layer does."""
    lines = []
    if config.fc_bias:
        lines.append(
            "fc has a bias; the class EagleLlamaForCausalLM of vLLM has none and silently leaves it out: train with "
            "--no-fusion-bias for vLLM"
        )
    if config.head_dim * config.num_heads != config.hidden_size:
        lines.append(
            f"heads of {config.head_dim} units do not make up {config.hidden_size}; the authors' own code takes no head_dim"
        )
    return lines
