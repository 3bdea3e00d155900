"""What the draft kind `eagle3` says in a manifest, and what its graphs look like from outside."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...bundle.schema import checked, failure, integer, list_of, optional
from ...graphs.role import PASSES, GraphRole, Values
from ...graphs.values import hidden_states
from .layer_role import PlacedLayerOptions, layer_interface, layer_role

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo, Manifest

TAPPED = ("low", "middle", "high")
"""Inputs of the graph `fusion`: hidden states after three of the cuts, as `taps` names them."""


@dataclass(kw_only=True)
class Eagle3Options(PlacedLayerOptions):
    """`taps`: the cuts whose hidden states the graph `fusion` joins."""

    taps: list[int] | None = checked(optional(list_of(integer(1, 1024), 3)), default=None)

    @property
    def tap_layers(self) -> Sequence[int]:
        return self.taps or ()

    def check(self, where: str, draft: DraftInfo, manifest: Manifest) -> None:
        cuts = manifest.decoder.cuts[1:-1]
        if self.taps is not None and not (len(self.taps) == 3 and set(self.taps) <= set(cuts)):
            raise failure(f"{where}.taps", self.taps, f"three of the cuts {cuts}")
        super().check(where, draft, manifest)


def _layer(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    inputs, outputs = layer_interface(manifest, "eagle3")
    del inputs["drafted"]  # what it gets of the target passed the graph `fusion`
    return inputs, outputs


def _fusion(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    hidden = hidden_states(manifest)
    return dict.fromkeys(TAPPED, hidden), {"hidden_out": hidden}


LAYER = layer_role("eagle3", _layer)
FUSION = GraphRole("fusion", _fusion, PASSES)
