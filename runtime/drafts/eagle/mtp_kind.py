"""The draft kind `mtp`: a model's own head for multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind
from ...graphs.role import Values
from .layer_role import PlacedLayerOptions, layer_interface, layer_role

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo, Manifest
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer


def _layer(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    return layer_interface(manifest, "mtp")


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .mtp import Mtp  # manifests are read without the proposers

    return Mtp(draft, decoder)


KIND = DraftKind("mtp", _propose, (layer_role("mtp", _layer),), PlacedLayerOptions)
