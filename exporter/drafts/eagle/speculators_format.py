"""Draft checkpoints in the format of the package `speculators` (github.com/vllm-project/speculators), in and out.

`config.json` has `speculators_model_type`, the shape of the layer (`transformer_layer_config`, a Llama's) and, in
`speculators_config`, what the draft was made for (`verifier`: name and class names); `model.safetensors` the tensors.

The type `eagle` is a layer of EAGLE-1 or EAGLE-2 (or HASS) under names of its own: `fusion_fc.*` for `fc.*`, `transformer.*` for
`layers.0.*`. It has no LM head and no embedding table, both are the target's. Versions of the package up to 0.4 have it.
`layernorms: true` puts norms around the layer, which no published EAGLE layer has.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    mrope_options,
    read_config,
)
from ..common.verifier import Verifier
from .eagle_network import EagleConfig, EagleNetwork
from .llama_config import llama_config

SPECULATORS = "speculators"
"""The format's name in `early_checks.FORMS`."""
VERSION = "0.2.0"
"""Of the package, for the type `eagle`: the one that `benchmarks/export_draft.py` compares with."""
NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
"""Prefix of a tensor of `EagleNetwork` → prefix of the type `eagle`."""
TARGETS = (TABLE, "lm_head.weight")
"""Tables of the target, which some files repeat; the target's own are read."""
DRAFT_LENGTH = 3


def model_type(folder: Path) -> str | None:
    """The `speculators_model_type` of the checkpoint in `folder`; None where it is no such checkpoint."""
    if find_weights(folder, WEIGHTS) is None or not (folder / CONFIG).is_file():
        return None
    name = read_config(folder / CONFIG).get("speculators_model_type")
    return None if name is None else str(name)[:80]


def read_verifier(folder: Path) -> Verifier:
    """The target that the checkpoint names. ExportError where it is not as the format has it."""
    path = folder / CONFIG
    own = read_config(path).get("speculators_config")
    entry = own.get("verifier") if isinstance(own, dict) else None
    if entry is None:
        return Verifier(None, ())
    name = entry.get("name_or_path") if isinstance(entry, dict) else 0
    classes = entry.get("architectures") or [] if isinstance(entry, dict) else 0
    if not isinstance(name, str | None) or not isinstance(classes, list):
        raise ExportError(
            f"{path}: speculators_config.verifier {entry!r:.80} is not a name and a list of class names"
        )
    return Verifier(name, tuple(str(each) for each in classes))


def of_verifier(folder: Path) -> dict[str, Any]:
    """What a draft keeps of `read_verifier`'s answer."""
    verifier = read_verifier(folder)
    return {"name": verifier.name or "", "architectures": list(verifier.architectures)}


def document(kind: str, version: str, layer: EagleConfig, verifier: Verifier) -> dict[str, Any]:
    """What every type's `config.json` has; `kind` is both its type and its algorithm, `version` that of the package."""
    return {
        "speculators_model_type": kind,
        "speculators_version": version,
        "torch_dtype": "float32",
        "transformer_layer_config": llama_config(layer, verifier),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFT_LENGTH}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
    }


def eagle_checkpoint(network: EagleNetwork, verifier: Verifier) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(`config.json`, tensors) of a layer as the type `eagle`. ExportError for one that has what the
    type has no place for: an LM head of its own, biases of queries, keys and values."""
    config = network.config
    if config.head != "shared":
        raise ExportError(
            f"the type 'eagle' of speculators has no place for this draft's LM head ({config.head}), it takes the target's; "
            "train with --head shared"
        )
    if config.qkv_bias:
        raise ExportError(
            "the type 'eagle' of speculators has no place for biases of queries, keys and values alone, which this draft has"
        )
    description = document("eagle", VERSION, config, verifier) | {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "layernorms": False,
        "fusion_bias": config.fc_bias,
    }
    return description, renamed(network.state_dict(), NAMES)


def read_eagle(folder: Path) -> EagleNetwork:
    """The layer of a checkpoint of the type `eagle`, float32. Raises ExportError naming the first thing that does not
    fit."""
    path = folder / CONFIG
    settings = read_config(path)
    inner = settings.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ExportError(f"{path}: transformer_layer_config {inner!r:.80} is not an object")
    if settings.get("layernorms"):
        raise ExportError(
            f"{path}: layernorms true is not supported, only EAGLE's layer without norms around it"
        )
    bias = settings.get("fusion_bias", False)
    weights = find_weights(folder, WEIGHTS)
    assert weights is not None, "ask model_type first"
    back = {theirs: ours for ours, theirs in NAMES.items()}
    # Copies of the target's tables are not read, however many rows of padding they have.
    tensors = renamed({n: t for n, t in read_weights(weights).items() if n not in TARGETS}, back)
    axes = mrope_options(path, inner)
    config = layer_shape(path, inner, tensors, "layers.0.", EagleConfig, fc_bias=bias, **axes)
    with torch.device("meta"):
        network = EagleNetwork(config)
    return filled(network, tensors, weights, "a layer of the type 'eagle'")


def renamed(tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """`tensors` with the prefixes of their names replaced; other names stay."""
    result = {}
    for name, value in tensors.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        result[prefixes.get(old, "") + name.removeprefix(old)] = value
    return result
