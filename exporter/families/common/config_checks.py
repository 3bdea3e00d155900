"""What every family refuses of a configuration, and the configuration of one layer."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.graphs.values import FULL, MASKS

LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers")

MOST_LAYERS = 1024  # as in a manifest


def single_layer(config: Any) -> Any:
    """A copy of a language model's configuration with one layer: a small stand-in where only other parts are traced."""
    small = copy.deepcopy(config)
    for name in LAYER_COUNTS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 1)
    return small


SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_heads",
    "head_dim",
    "d_kv",
    "hidden_size",
    "d_model",
    "vocab_size",
)
"""Sizes of layers in the configurations of all families; none may be below 1."""


def check_common(
    config: Any, architecture: str, *, windows: bool = False, further: Collection[str] = ()
) -> None:
    """Refuses options that no family supports; `windows`: whether layers with sliding attention are none of them. `further`
    kinds of layers, which are no attention, are supported."""
    for name in LAYER_COUNTS:
        count = getattr(config, name, None)
        if count is not None and (type(count) is not int or not 1 <= count <= MOST_LAYERS):
            raise UnsupportedModelError(f"{architecture}: {name}={count!r} is not in 1..{MOST_LAYERS}")
    for name in SIZES:
        size = getattr(config, name, None)
        if size is not None and (type(size) is not int or size < 1):
            raise UnsupportedModelError(
                f"{architecture}: {name}={size!r:.40} is not a positive integer; correct config.json"
            )
    kinds = set(getattr(config, "layer_types", None) or [FULL]) - {*further}
    if windows:
        _check_windows(config, kinds, architecture)
        return
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"{architecture}: sliding_window={config.sliding_window} is not supported"
        )
    if kinds != {FULL}:
        raise UnsupportedModelError(
            f"{architecture}: layer_types {sorted(kinds)} are not supported, only {' and '.join((FULL, *further))}"
        )


def check_language_model(config: Any, architecture: str, known: Iterable[str]) -> None:
    """Refuses a whole model whose language model is of another kind than the `known` ones."""
    if config.model_type not in (known := list(known)):
        names = ", ".join(map(repr, known))
        raise UnsupportedModelError(
            f"{architecture} with the language model {config.model_type!r} is not supported, only with {names}"
        )


def _check_windows(config: Any, kinds: set[str], architecture: str) -> None:
    """What says which layers see a window, and how long it is."""
    if not kinds <= MASKS.keys():
        raise UnsupportedModelError(
            f"{architecture}: layer_types {sorted(kinds)} are not supported, only {' and '.join(MASKS)}"
        )
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and (type(window) is not int or window < 1):
        raise UnsupportedModelError(
            f"{architecture}: sliding_window={window!r:.40} is not a positive integer; correct config.json"
        )


def windows_of(config: Any) -> dict[str, Any]:
    """The fields of a `DecoderShape` that say which layers see a window; none where all see everything."""
    kinds = list(getattr(config, "layer_types", None) or [])
    if "sliding_attention" not in kinds:
        return {}
    return {"layer_types": kinds, "sliding_window": config.sliding_window}
