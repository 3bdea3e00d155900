"""Roles of the graphs of a decoding pass: segments of the decoder, its head, and what moves slots within its caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .role import PASSES, VERIFY, GraphRole, Values
from .values import caches, hidden_states, layers_interface, vocabulary

if TYPE_CHECKING:
    from ..bundle.manifest import GraphInfo, Manifest


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
