"""What the draft kind `vispec` says in a manifest, and what its graphs look like from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...bundle.draft_kind import draft_with
from ...bundle.schema import checked, integer, optional
from ...common.errors import BundleError
from ...graphs.role import REQUEST, GraphRole, Values
from .layer_role import LayerOptions, layer_interface, layer_role

if TYPE_CHECKING:
    from ...bundle.manifest import Manifest


@dataclass(kw_only=True)
class VispecOptions(LayerOptions):
    """`queries`: embeddings that the graph `adaptor` makes of a picture."""

    queries: int | None = checked(optional(integer(2, 256)), default=None)


def _layer(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    inputs, outputs = layer_interface(manifest, "vispec")
    inputs |= {
        "visual": (manifest.compute_dtype, ("visual", manifest.decoder.hidden_size)),
        "visual_index": ("int64", ("batch", "width")),
        "compressed": ("bool", ("batch", "width")),
    }
    return inputs, outputs


def _adaptor(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    draft = draft_with(manifest, "adaptor")
    options = None if draft is None else draft.options
    if not isinstance(options, VispecOptions) or options.queries is None:
        raise BundleError("manifest field 'drafts': no draft names the queries of the graph 'adaptor'")
    dtype, width = manifest.compute_dtype, manifest.decoder.hidden_size
    return (
        {"image_rows": (dtype, ("image_rows", width))},
        {"visual_rows": (dtype, (options.queries, width))},
    )


ADAPTOR = GraphRole("adaptor", _adaptor, (REQUEST,), reads_picture=True)
LAYER = layer_role("vispec", _layer)
