"""The draft kind `eagle`."""

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
    return layer_interface(manifest, "eagle")


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .eagle import Eagle

    return Eagle(draft, decoder)


KIND = DraftKind("eagle", _propose, (layer_role("eagle", _layer),), PlacedLayerOptions)
