"""Positions of a draft's layer: what its manifest entry says, what its graph takes, and where pairs stand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.bundle.draft_info import DraftInfo
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.decoder.positions import positions_of_slots
from vlmexport.runtime.drafts.eagle.layer_role import layer_interface
from vlmexport.runtime.families.mrope import Span, positions

from docs.generate.graphs import manifests

CACHE = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def entry(kind: str, **more: Any) -> dict[str, Any]:
    taps = {"taps": [1, 1, 1]} if kind == "eagle3" else {}
    return {"name": kind, "kind": kind, "graphs": {kind: kind}, "ranks": 10, "cache": CACHE, **taps, **more}


def shape(draft: DraftInfo) -> tuple[Any, ...]:
    """Of the positions that its graph takes."""
    manifest: Manifest = next(manifests())
    manifest.drafts = [draft]
    return tuple(layer_interface(manifest, draft.kind)[0]["positions"][1])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_entry_says_the_kind_of_positions(kind: str) -> None:
    """One from before says nothing, and stays as it is when it is written again."""
    for more, wanted in (
        ({}, ("batch", "width")),
        ({"position": "rotary"}, ("batch", "width")),
        ({"position": "mrope"}, (3, "batch", "width")),
    ):
        draft = DraftInfo.parse(entry(kind, **more), "drafts[0]")
        assert shape(draft) == wanted
        assert {name: value for name, value in draft.to_dict().items() if name == "position"} == more
    with pytest.raises(BundleError, match=r"drafts\[0\]\.position.*'learned' is not one of rotary, mrope"):
        DraftInfo.parse(entry(kind, position="learned"), "drafts[0]")


def test_a_vispec_layer_has_one_axis_whatever_its_entry_says() -> None:
    draft = DraftInfo.parse(entry("vispec", queries=3, position="mrope"), "drafts[0]")
    assert shape(draft) == ("batch", "width")


def test_pairs_stand_where_the_targets_tokens_do() -> None:
    """A picture of 2 × 3 rows at slots 1..6: text behind it goes on after its longer side, on every axis."""
    slots = np.array([0, 2, 6, 7, 8, 9, 12])
    assert positions_of_slots(None, slots).tolist() == [slots.tolist()]
    prompt = positions(9, [Span(1, 1, 2, 3)])
    found = positions_of_slots(prompt, slots)
    assert found[:, :5].tolist() == prompt[:, [0, 2, 6, 7, 8]].tolist()
    assert found[:, 4:].tolist() == [[5, 6, 9]] * 3
