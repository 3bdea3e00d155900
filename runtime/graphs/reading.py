"""Roles of the graphs that read what a request brings: pictures, a source, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .role import PASSES, REQUEST, GraphRole, Shape, Values
from .values import cross_caches, embedding_tensors, hidden_states

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest


def _encoder(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    decoder, dtype = manifest.decoder, manifest.compute_dtype
    heads = decoder.num_heads if manifest.encoder is None else manifest.encoder.num_heads
    source = dtype, ("batch", "source", decoder.hidden_size)
    mask: Shape = ("batch", heads, "source", "source")
    kind = dtype if decoder.mask_dtype == "bool" else decoder.mask_dtype
    return {"encoder_rows": source, "encoder_mask": (kind, mask)}, {"encoder_states": source}


def _cross_kv(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    decoder = manifest.decoder
    source = manifest.compute_dtype, ("batch", "source", decoder.hidden_size)
    return {"encoder_states": source}, cross_caches(manifest, range(decoder.num_layers))


def _embed(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    inputs: Values = {
        "token_ids": ("int64", ("batch", "width")),
        **embedding_tensors(manifest),
    }
    return inputs, {"hidden": hidden_states(manifest)}


ROLES = (
    GraphRole("vision", None, (REQUEST,), captures=False, reads_picture=True),
    GraphRole("encoder", _encoder, (REQUEST,), captures=False),
    GraphRole("cross_kv", _cross_kv, (REQUEST,), captures=False),
    GraphRole("embed", _embed, PASSES),
)
