"""What kinds with one layer of their own over pairs of a feature and a token declare: its graph, and their options."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...bundle.draft_kind import draft_with
from ...bundle.draft_options import DraftCache, DraftOptions, DraftPasses, DraftVocabulary
from ...bundle.schema import checked, failure, integer, optional, string
from ...common.errors import BundleError
from ...graphs.role import PASSES, GraphRole, Interface, Values
from ...graphs.values import embedding_tensors, hidden_states, own_layer

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo, Manifest


LAYER_POSITIONS = ("rotary", "mrope")
"""Kinds of positions of such a layer, as a decoder has them (`positions_shape`)."""


@dataclass(kw_only=True)
class LayerOptions(DraftOptions):
    """`cache` of the layer, `ranks` (proposals behind each pair), `vocabulary` where it chooses from frequent tokens
    only."""

    cache: DraftCache | None = checked(optional(DraftCache.parse), default=None)
    vocabulary: DraftVocabulary | None = checked(optional(DraftVocabulary.parse), default=None)
    ranks: int | None = checked(optional(integer(1, 64)), default=None)

    @property
    def offers_trees(self) -> bool:
        return self.ranks is not None

    @property
    def own_cache(self) -> DraftCache | None:
        return self.cache

    @property
    def layer_position(self) -> str:
        """The kind of its positions."""
        return "rotary"

    def check(self, where: str, draft: DraftInfo, manifest: Manifest) -> None:
        if self.vocabulary is not None:
            d2t = manifest.tensors.get(self.vocabulary.d2t)
            if d2t is None or d2t.dtype != "int64" or d2t.shape != [self.vocabulary.size]:
                expected = f"an int64 [{self.vocabulary.size}] tensor of this bundle"
                raise failure(f"{where}.vocabulary.d2t", self.vocabulary.d2t, expected)

    def passes(self, draft: DraftInfo, first: Sequence[str]) -> DraftPasses:
        """The layer once per token; other graphs run once per picture, or beside the target's pass."""
        return DraftPasses(propose=() if self.cache is None else [draft.graphs[draft.kind]])


@dataclass(kw_only=True)
class PlacedLayerOptions(LayerOptions):
    """`position`: `mrope` where the layer's positions are the target's, with three axes. None, as entries have it that were
    written before: `rotary`, they count."""

    position: str | None = checked(optional(string(40, LAYER_POSITIONS)), default=None)

    @property
    def layer_position(self) -> str:
        return self.position or super().layer_position

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        if self.position is None:
            del found["position"]
        return found


def layer_interface(manifest: Manifest, role: str) -> tuple[Values, Values]:
    """What the graph of every such layer takes and gives. Raises `BundleError` where no draft says how large it is."""
    draft = draft_with(manifest, role)
    options = None if draft is None else draft.options
    cache = options.cache if isinstance(options, LayerOptions) else None
    if (
        not isinstance(options, LayerOptions)
        or options.ranks is None
        or cache is None
        or cache.num_layers != 1
    ):
        raise BundleError(
            f"manifest field 'drafts': no draft names ranks and the cache of one layer of the graph {role!r}"
        )
    dtype, width = manifest.compute_dtype, manifest.decoder.hidden_size
    placed, updated = own_layer(manifest, cache, options.layer_position)
    inputs: Values = {
        "hidden": (dtype, ("sources", width)),
        "feature_index": ("int64", ("batch", "width")),
        "drafted": ("bool", (1,)),
        "next_ids": ("int64", ("batch", "width")),
        **embedding_tensors(manifest),
        **placed,
        "row_index": ("int64", ("rows",)),
    }
    outputs: Values = {
        "hidden_out": hidden_states(manifest),
        "token_ids": ("int64", ("rows", options.ranks)),
        "log_probabilities": ("float32", ("rows", options.ranks)),
    }
    return inputs, outputs | updated


def layer_role(name: str, interface: Interface) -> GraphRole:
    """The role of such a layer."""
    return GraphRole(name, interface, PASSES, own_cache=True)
