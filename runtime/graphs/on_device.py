"""Roles of the graphs that do on a device what the host does elsewhere: masks and positions, and changes of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .role import TOKEN, VERIFY, GraphRole, Shape, Values
from .text_layout import TextLayout
from .values import CONV_SLOTS, MASKS, positions_shape, slots_read, vocabulary

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest

CHANGING = ("penalties", "repeats")
"""Roles of graphs that change logits where they lie."""

HOST_ROLES = ("embed", "mask", *CHANGING)
"""Roles of graphs that an engine in host memory does without."""


def _mask(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    decoder = manifest.decoder
    inputs: Values = {
        "start": ("int64", ("batch",)),
        "depths": ("int64", ("batch", "width")),
        "ancestors": ("bool", ("batch", "width", "span")),
        "slots": ("int64", ("cache",)),
    }
    outputs = slots_read(decoder, range(decoder.num_layers))
    if decoder.mask_dtype != "bool" or {MASKS["sliding_attention"], CONV_SLOTS} & outputs.keys():
        inputs["slot_depths"] = ("int64", ("batch", "span"))
    if decoder.mask_dtype != "bool":
        inputs["distance_bias"] = (decoder.mask_dtype, ("distances", decoder.mask_heads))
    positions = positions_shape(decoder.position, 0)
    if positions is not None:
        inputs["first_positions"] = ("int64", ("batch",))
        outputs["positions"] = ("int64", positions)
    return inputs, outputs


def _penalties(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    words, layout = vocabulary(manifest), TextLayout.of(manifest.limits)
    logits: tuple[str, Shape] = ("float32", ("rows", words))
    inputs: Values = {
        "raw_logits": logits,
        "said": ("int64", (layout.places,)),
        "recent": ("int64", (manifest.limits.max_width,)),
        "end": ("int64", (1,)),
        "tokens": ("int64", ("span",)),
        "token_depths": ("int64", ("span",)),
        "ancestors": ("bool", ("rows", "span")),
        "depths": ("int64", ("rows",)),
        "held": ("int64", (1,)),
        "ends": ("bool", (words,)),
        "banned": ("bool", (words,)),
        "penalty": ("float32", (1,)),
    }
    return inputs, {"said_now": inputs["said"], "logits": logits}


def _repeats(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    inputs, outputs = _penalties(manifest, name, layers)
    return inputs | {"needed": ("int64", (TextLayout.of(manifest.limits).compared,))}, outputs


ROLES = (
    GraphRole("mask", _mask, (TOKEN, VERIFY)),
    GraphRole("penalties", _penalties, (TOKEN, VERIFY)),
    GraphRole("repeats", _repeats, (TOKEN, VERIFY)),
)
