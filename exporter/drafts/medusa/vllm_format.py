"""Medusa heads as vLLM reads them (its class `Medusa`, method "medusa"), in and out.

`config.json` has `model_type` "medusa", `num_heads`, `num_hidden_layers` and, of a trimmed vocabulary,
`truncated_vocab_size`. `model.safetensors` has `blocks.{head}.layers.{layer}.weight [E, E]`, with `.bias [E]` where
`medusa_fc_bias` says so, `lm_heads.{head}.weight [V, E]`, and `token_map [truncated]` with the ids of a trimmed vocabulary.
With `original_lm_head` all heads read one LM head, the target's, which is stored as `lm_heads.0.weight`: the draft is read
without its target.
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
from ..common.published import CONFIG, WEIGHTS, filled, find_weights, matrix, read_config
from ..common.verifier import Verifier
from .medusa_network import MedusaConfig, MedusaHeads

MEDUSA = "medusa"
"""The format's name in `early_checks.FORMS`, and its `model_type`."""
PREFIX = "medusa_heads."
"""What some checkpoints write before each name; vLLM takes it away, too."""
TOKEN_MAP, TABLE = "token_map", "lm_heads.0.weight"
_OURS = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_THEIRS = re.compile(r"(?:blocks\.(\d{1,4})\.layers\.(\d{1,4})\.(weight|bias)|lm_heads\.(\d{1,4})\.weight)")


def is_published(folder: Path) -> bool:
    """Whether `folder` looks like such a checkpoint."""
    if find_weights(folder, WEIGHTS) is None or not (folder / CONFIG).is_file():
        return False
    return read_config(folder / CONFIG).get("model_type") == MEDUSA


def medusa_checkpoint(network: MedusaHeads, verifier: Verifier) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(`config.json`, tensors) of heads for that target. Raises ExportError for heads that share its LM head where that is not
    at hand."""
    config = network.config
    shared = config.head == "shared"
    tensors = {_their_name(name, config.layers): value for name, value in network.state_dict().items()}
    words = config.vocab_size
    if shared:
        table = verifier.read_lm_head()
        tensors[TABLE], words = table, table.shape[0]
    document: dict[str, Any] = {
        "model_type": MEDUSA,
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": words,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "torch_dtype": "float32",
        "base_model_name_or_path": verifier.name,
    }
    if config.trimmed is not None:
        document["truncated_vocab_size"] = config.trimmed
    return document, tensors


def read_medusa(folder: Path) -> tuple[MedusaHeads, dict[str, Any]]:
    """(the heads in float32, `config.json`). Raises ExportError naming the first thing that does not fit."""
    document = read_config(folder / CONFIG)
    path = find_weights(folder, WEIGHTS)
    assert path is not None, "ask is_published first"
    tensors = {name.removeprefix(PREFIX): value for name, value in read_weights(path).items()}
    shared = document.get("original_lm_head") is True
    if shared:
        tensors.pop(TABLE, None)  # the target's own is read
    found = [match for name in tensors if (match := _THEIRS.fullmatch(name))]
    heads = 1 + max((int(match[1]) for match in found if match[1]), default=0)
    layers = 1 + max((int(match[2]) for match in found if match[2]), default=0)
    width = matrix(path, tensors, "blocks.0.layers.0.weight", "Medusa heads").shape[0]
    d2t = tensors.pop(TOKEN_MAP, None)
    if d2t is not None and not shared:
        d2t, tensors = _trimmed(path, d2t, tensors)
    renamed = {_our_name(name, layers): value for name, value in tensors.items()}
    for head in range(heads):  # vLLM's own layers have biases only where the configuration says so
        for layer in range(layers):
            renamed.setdefault(f"{head}.{layer}.linear.bias", torch.zeros(width))
    trimmed = None if d2t is None or shared else len(d2t)
    if trimmed is not None and d2t is not None:
        renamed["d2t"] = d2t
    try:
        kind = "shared" if shared else "own" if trimmed is None else "trimmed"
        config = MedusaConfig(width, document.get("vocab_size"), heads, layers, kind, trimmed)
    except OptionError as error:
        raise ExportError(f"{folder / CONFIG}: {error}") from error
    with torch.device("meta"):
        network = MedusaHeads(config)
    return filled(network, renamed, path, f"{heads} heads of {layers} layers"), document


def _trimmed(path: Path, d2t: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The ids of a trimmed vocabulary, and the tensors with only their rows of LM heads, which may be stored whole."""
    if d2t.dim() != 1 or d2t.is_floating_point():
        raise ExportError(f"{path}: {TOKEN_MAP} is not a list of ids")
    ids = d2t.long()
    result = dict(tensors)
    for name, value in tensors.items():
        if name.startswith("lm_heads.") and value.dim() == 2 and len(value) > len(ids):
            if not bool(((ids >= 0) & (ids < len(value))).all()):
                raise ExportError(
                    f"{path}: {TOKEN_MAP} names ids outside {name}, which has {len(value)} rows"
                )
            result[name] = value[ids]
    return ids, result


def _their_name(name: str, layers: int) -> str:
    if name == "d2t":
        return TOKEN_MAP
    match = _OURS.fullmatch(name)
    assert match is not None, name
    head, part, kind = match.groups()
    return f"lm_heads.{head}.weight" if int(part) == layers else f"blocks.{head}.layers.{part}.{kind}"


def _our_name(name: str, layers: int) -> str:
    """Ours, or `name` as it is where no head has such a tensor: `filled` names it then."""
    match = _THEIRS.fullmatch(name)
    if match is None:
        return name
    head, layer, kind, own = match.groups()
    return f"{own}.{layers}.weight" if own else f"{head}.{layer}.linear.{kind}"
