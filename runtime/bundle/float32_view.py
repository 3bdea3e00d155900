"""A bundle of float16 or bfloat16 as an engine sees it that computes and caches in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..common.errors import BundleError
from ..graphs.values import EMBEDDING

if TYPE_CHECKING:
    from .manifest import GraphInfo, Manifest, ValueInfo

WIDE = "float32"
NARROW = ("float16", "bfloat16")


def as_float32(manifest: Manifest) -> Manifest:
    """The manifest with every graph replaced by the one in its `float32` file, which casts its weights while it is
    loaded: hidden states between graphs, masks and caches are float32, weights and `tensors` stay as they are stored.

    A bundle that computes and caches in float32 comes back as it is. Raises `BundleError` where a graph has no such
    file.
    """
    if manifest.compute_dtype == manifest.cache_dtype == WIDE:
        return manifest
    decoder = manifest.decoder
    if decoder.mask_dtype in NARROW:
        decoder = replace(decoder, mask_dtype=WIDE)
    return replace(
        manifest,
        compute_dtype=WIDE,
        cache_dtype=WIDE,
        decoder=decoder,
        graphs={name: _widened(name, graph) for name, graph in manifest.graphs.items()},
    )


def _widened(name: str, graph: GraphInfo) -> GraphInfo:
    if graph.float32 is None:
        raise BundleError(
            f"manifest field 'graphs.{name}.float32' is null: this bundle cannot be computed in float32, which the "
            "engine of a CPU does; build it again"
        )
    return replace(
        graph,
        file=graph.float32,
        float32=None,
        folded=graph.float32_folded,
        float32_folded=None,
        inputs=[_value(value) for value in graph.inputs],
        outputs=[_value(value) for value in graph.outputs],
    )


def _value(value: ValueInfo) -> ValueInfo:
    # The table of embeddings is bound as it lies in the weights file.
    narrow = value.dtype in NARROW and value.name not in EMBEDDING
    return replace(value, dtype=WIDE) if narrow else value
