"""EAGLE-3 checkpoints: as their authors publish them (github.com/SafeAILab/EAGLE), as ModelOpt exports them, and of the type
`eagle3` of `speculators`.

`fc.weight [E, 3E]`; the layer, `midlayer.*` or `layers.0.*`: `self_attn.{q,k,v}_proj.weight [.., 2E]`, `self_attn.o_proj`, `mlp.*`,
`hidden_norm`, `input_layernorm`, `post_attention_layernorm`; `norm.weight`; `lm_head.weight [Vd, E]`; where Vd is below the
target's V, `d2t` int64 [Vd], what must be added to an id of the draft to give the target's, and `t2d` bool [V]. An
`embed_tokens.weight [V, E]` is a copy of the target's table, which is read in its place.

Layers whose hidden states are read stand in `eagle_aux_hidden_state_layer_ids`: the number of layers before the hidden state; without it they are
2, L / 2 and L − 3. ModelOpt writes below `eagle_config` which layers' output it reads, one less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....runtime.common.errors import ExportError
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
from .eagle3_network import Eagle3Config, Eagle3Network
from .eagle_checkpoint import WIDE, names_in, read_tensors
from .speculators_format import document, renamed

TAPS = "eagle_aux_hidden_state_layer_ids"
TYPE = "eagle3"
VERSION = "0.9.0"
"""Of the package `speculators`: the one that `benchmarks/export_draft.py` compares with."""
NAMES = {"midlayer.": "layers.0.", "lm_head.": "head."}
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")
"""Variants of speculators whose norms stand elsewhere."""


def is_published(folder: Path) -> bool:
    """Whether `folder` looks like such a checkpoint."""
    if not (folder / CONFIG).is_file() or not names_in(folder) & set(WIDE):
        return False
    return read_config(folder / CONFIG).get("speculators_model_type", TYPE) == TYPE


def read_published(folder: Path) -> Eagle3Network:
    """The layer in float32. Raises ExportError naming the first thing that does not fit."""
    path = folder / CONFIG
    settings = read_config(path)
    inner = settings.get("transformer_layer_config", settings)
    if not isinstance(inner, dict):
        raise ExportError(f"{path}: transformer_layer_config {inner!r:.80} is not an object")
    for name in UNSUPPORTED:
        if settings.get(name):
            raise ExportError(f"{path}: {name} true is not supported")
    width = inner.get("hidden_size")
    if settings.get("target_hidden_size") not in (None, width):
        raise ExportError(
            f"{path}: a target of width {settings['target_hidden_size']!r:.40} is not supported, the layer has {width!r:.40}"
        )
    weights = find_weights(folder, WEIGHTS)
    assert weights is not None, "ask is_published first"
    tensors = read_tensors(weights)
    tensors.pop(TABLE, None)  # read in its place is the target's, however many rows of padding this one has
    words, head = inner.get("vocab_size"), tensors.get("lm_head.weight")
    known = tensors.pop("t2d", None)  # says of the target's ids what d2t says
    if known is not None and known.dim() == 1:
        words = len(known)
    few = head.shape[0] if head is not None and head.dim() == 2 else words
    trimmed = few if "d2t" in tensors else None
    named = renamed(tensors, NAMES)
    config = layer_shape(
        path,
        {**inner, "vocab_size": words},
        named,
        "layers.0.",
        Eagle3Config,
        head="own" if trimmed is None else "trimmed",
        trimmed=trimmed,
        taps=_taps(path, settings),
        norm_before_residual=settings.get("norm_before_residual", False),
        **mrope_options(path, inner),
    )
    if trimmed is None and few != words:
        raise ExportError(f"{weights}: there is no d2t, but {few!r:.40} of {words!r:.40} tokens")
    with torch.device("meta"):
        network = Eagle3Network(config)
    ids = named.pop("d2t", None)
    if ids is not None:
        named["d2t"] = _target_ids(weights, ids, config)
    return filled(network, named, weights, "one layer of EAGLE-3")


def _taps(path: Path, settings: dict[str, Any]) -> tuple[int, ...] | None:
    """Numbers of layers before the hidden states. ModelOpt counts the layers whose output it reads from 0, in any order."""
    other = settings.get("eagle_config")
    own = other.get(TAPS) if isinstance(other, dict) and TAPS not in settings else None
    taps = settings.get(TAPS, own)
    if taps is not None and not isinstance(taps, list):
        raise ExportError(f"{path}: {TAPS} {taps!r:.80} is not a list")
    if own and all(type(layer) is int for layer in own):
        taps = sorted(layer + 1 for layer in own)
    return None if not taps else tuple(taps)


def _target_ids(weights: Path, offsets: Tensor, config: Eagle3Config) -> Tensor:
    """Ids of the target of what must be added to the draft's."""
    if offsets.shape != (config.trimmed,) or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ExportError(
            f"{weights}: d2t has shape {list(offsets.shape)} and type {offsets.dtype}, not {[config.trimmed]} whole numbers"
        )
    return offsets.long() + torch.arange(len(offsets))


def speculators_checkpoint(
    network: Eagle3Network, verifier: Verifier
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(`config.json`, tensors) of the type `eagle3`."""
    config = network.config
    description = document(TYPE, VERSION, config, verifier) | {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.proposed,
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": None,
        TAPS: list(config.taps or ()) or None,
    }
    tensors = renamed(network.state_dict(), {"head.": "lm_head."})
    if config.trimmed is not None:
        ids = tensors["d2t"]
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return description, tensors
