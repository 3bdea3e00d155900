"""Roles of the graphs of a decoding pass: segments of the decoder, its head, and what moves slots within its caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .role import PASSES, VERIFY, GraphRole, Values
from .states import state_counts, states
from .values import (
    caches,
    cross_caches,
    deepstack_inputs,
    hidden_states,
    segment_positions,
    slots_read,
    vocabulary,
)

if TYPE_CHECKING:
    from ..bundle.manifest import GraphInfo, Manifest


def layers_interface(
    manifest: Manifest, layers: Sequence[int], attention: Iterable[int]
) -> tuple[Values, Values]:
    """Of a graph that computes hidden states of `layers`, with the caches or states of those in `attention`."""
    decoder, attention, first = manifest.decoder, list(attention), layers[0]
    inputs: Values = {
        "hidden": hidden_states(manifest),
        **({"write_indices": ("int64", ("batch",))} if caches(manifest, attention) else {}),
        **slots_read(decoder, attention),
        **state_counts(decoder, attention),
        **caches(manifest, attention),
        **states(manifest, attention),
        **dict.fromkeys(deepstack_inputs(decoder.deepstack_layers, layers), hidden_states(manifest)),
    }
    positions = segment_positions(decoder, first, attention)
    if positions is not None:
        inputs["positions"] = ("int64", positions)
    if decoder.cross_attention:
        inputs["cross_mask"] = ("bool", ("batch", 1, "width", "source"))
        inputs |= cross_caches(manifest, attention)
    kept = caches(manifest, attention, "updated_") | states(manifest, attention, "updated_")
    return inputs, kept | {"hidden_out": hidden_states(manifest)}


def _segment(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    own = range(*(layers or (0, manifest.decoder.num_layers)))
    return layers_interface(manifest, own, own)


def _segment_layers(manifest: Manifest, graph: GraphInfo) -> Sequence[int]:
    return range(*(graph.layers or (0, 0)))


def _head(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    inputs: Values = {"hidden": hidden_states(manifest), "row_index": ("int64", ("rows",))}
    return inputs, {"logits": ("float32", ("rows", vocabulary(manifest)))}


def _commit(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    own = range(*(layers or (0, manifest.decoder.num_layers)))
    moves: Values = {
        "write_indices": ("int64", ("batch",)),
        "source_rows": ("int64", ("batch", "width")),
    }
    return moves | caches(manifest, own), caches(manifest, own, "updated_")


ROLES = (
    GraphRole("segment", _segment, PASSES, numbered=True, cached_layers=_segment_layers),
    GraphRole("head", _head, PASSES),
    GraphRole("commit", _commit, (VERIFY,), captures=False),  # run twice, it moves slots twice
)
