"""What layers with linear attention keep of a sequence: a state of fixed size, and the rows since (docs/reference/graph-interfaces.md).

A state holds the first rows of a sequence and cannot be cut back. So it holds accepted rows only: a pass replays the `pending`
ones behind it, and folds as many of the next rows as it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from .role import Values
from .values import LINEAR, kind_of_layer

if TYPE_CHECKING:
    from ..bundle.decoder_info import DecoderInfo
    from ..bundle.manifest import Manifest

RECENT_ROWS, RECURRENT_STATE = "recent_rows", "recurrent_state"
STATES = (RECENT_ROWS, RECURRENT_STATE)
"""What a layer with linear attention keeps."""

PENDING, FOLDED = "pending", "folded"
COUNTS = (PENDING, FOLDED)
"""Inputs int64 [batch]: rows before a pass that the states do not hold yet; and how many of these, and of the pass's own, the
updated states hold."""


class LinearSizes(Protocol):
    """Sizes of layers with linear attention: a manifest's, or those that a family says."""

    @property
    def num_key_heads(self) -> int: ...
    @property
    def num_value_heads(self) -> int: ...
    @property
    def key_head_dim(self) -> int: ...
    @property
    def value_head_dim(self) -> int: ...
    @property
    def conv_kernel(self) -> int: ...


def linear_layers(layer_types: Sequence[str] | None, layers: Iterable[int]) -> list[int]:
    """Those of some layers that keep a state."""
    return [layer for layer in layers if kind_of_layer(layer_types, layer) == LINEAR]


def state_shapes(linear: LinearSizes, max_width: int) -> dict[str, tuple[int, ...]]:
    """Of one sequence. A pass may follow `max_width` rows that its states do not hold: the most that a cycle accepts."""
    values, keys = linear.num_value_heads, linear.num_key_heads * linear.key_head_dim
    row = 2 * keys + values * linear.value_head_dim + 2 * values
    return {
        RECENT_ROWS: (linear.conv_kernel - 1 + max_width, row),
        RECURRENT_STATE: (values, linear.key_head_dim, linear.value_head_dim),
    }


def sequence_states(manifest: Manifest, layers: Iterable[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The states that those of some layers of the target keep of one sequence: by name, dtype and shape."""
    decoder = manifest.decoder
    own = linear_layers(decoder.layer_types, layers)
    if not own:
        return {}
    assert decoder.linear_attention is not None, "checked with the manifest"
    shapes = state_shapes(decoder.linear_attention, manifest.limits.max_width)
    dtypes = {RECENT_ROWS: manifest.cache_dtype, RECURRENT_STATE: "float32"}
    return {f"{name}.{layer}": (dtypes[name], shapes[name]) for name in STATES for layer in own}


def states(manifest: Manifest, layers: Iterable[int], prefix: str = "") -> Values:
    """`sequence_states` of a batch, as a graph has them."""
    return {
        f"{prefix}{name}": (dtype, ("batch", *shape))
        for name, (dtype, shape) in sequence_states(manifest, layers).items()
    }


def state_counts(decoder: DecoderInfo, layers: Iterable[int]) -> Values:
    """What a graph with some layers of the target is told of their states."""
    return dict.fromkeys(COUNTS, ("int64", ("batch",))) if linear_layers(decoder.layer_types, layers) else {}
