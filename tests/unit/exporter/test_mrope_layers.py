"""Layers whose rotary positions have the target's three axes give the rows that AngelSlim's code gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from vlmexport.exporter.drafts.common.attention_cache import mrope_axes
from vlmexport.exporter.drafts.common.verifier import Verifier
from vlmexport.exporter.drafts.eagle.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle.eagle3 import Eagle3Draft
from vlmexport.exporter.drafts.eagle.eagle3_network import Eagle3Config, Eagle3Network
from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig, EagleNetwork
from vlmexport.exporter.drafts.eagle.vispec_network import VispecConfig
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.decoder.positions import positions_of_slots
from vlmexport.runtime.families.mrope import Span, positions

from tests.support.mrope_angles import angles_of
from tests.support.tiny_bundles import seeded, stir

WIDTH, HEADS, GROUPS, SIZE = 96, 3, 1, 128
COUNT, PROMPT = 40, 31
QWEN3 = {"mrope_section": (24, 20, 20), "mrope_interleaved": True}
QWEN2_5 = {"mrope_section": (16, 24, 24), "mrope_interleaved": True}
"""As AngelSlim trains layers for Qwen2.5-VL: sections that are longer than there is place."""
IN_SECTIONS = {"mrope_section": (16, 24, 24)}


def target_positions() -> Tensor:
    """int64 [3, 1, COUNT] of a prompt with a picture of 4 × 6 rows at slots 3..26, and text behind it."""
    prompt = positions(PROMPT, [Span(3, 1, 4, 6)])
    assert (prompt[0] != prompt[1]).any() and (prompt[1] != prompt[2]).any()
    return torch.from_numpy(positions_of_slots(prompt, torch.arange(COUNT).numpy()))[:, None]


def rows_of_angelslim(network: Any, embedded: Tensor, features: Tensor, places: Tensor) -> Tensor:
    """One decoder layer over [norm(embedding), norm(feature)], spelled out; [1, T, E]."""
    state = network.state_dict()
    weight = lambda name: state[f"layers.0.{name}.weight"]  # noqa: E731

    def normed(name: str, rows: Tensor) -> Tensor:
        return weight(name) * rows * (rows.pow(2).mean(-1, keepdim=True) + network.config.norm_eps).rsqrt()

    def heads(name: str, count: int) -> Tensor:
        return (joined @ weight(f"self_attn.{name}").T).view(1, -1, count, SIZE).transpose(1, 2)

    def rotated(states: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        return states * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat(
            [sin, sin], -1
        )

    joined = torch.cat([normed("input_layernorm", embedded), normed("hidden_norm", features)], -1)
    cos, sin = (each[:, None] for each in angles_of(network.config, places))
    queries, keys = (
        rotated(heads("q_proj", HEADS)),
        rotated(heads("k_proj", GROUPS)).expand(-1, HEADS, -1, -1),
    )
    scores = queries @ keys.transpose(2, 3) / SIZE**0.5
    scores = scores + torch.full((COUNT, COUNT), -torch.inf).triu(1)
    seen = scores.softmax(-1) @ heads("v_proj", GROUPS).expand(-1, HEADS, -1, -1)
    rows = features + seen.transpose(1, 2).reshape(1, COUNT, -1) @ weight("self_attn.o_proj").T
    inner = normed("post_attention_layernorm", rows)
    gate = torch.nn.functional.silu(inner @ weight("mlp.gate_proj").T) * (inner @ weight("mlp.up_proj").T)
    return rows + gate @ weight("mlp.down_proj").T


def wide(**axes: Any) -> Eagle3Network:
    """A layer with random weights, the same whatever was drawn before."""
    config = Eagle3Config(
        WIDTH, 200, HEADS, GROUPS, SIZE, 128, rope_theta=5e6, norm_eps=1e-6, taps=(1, 1, 1), **axes
    )
    with seeded(31) as generator:
        network = Eagle3Network(config)
        stir(network, generator, 3 / WIDTH**0.5)
    return network.eval()


@pytest.mark.parametrize("axes", [QWEN3, QWEN2_5, IN_SECTIONS], ids=["qwen3-vl", "qwen2.5-vl", "in sections"])
@torch.no_grad()
def test_rows_are_those_of_angelslim(axes: dict[str, Any]) -> None:
    """With a picture before the text. One axis for all, or the axes in another order of angles, are other rows."""
    network, places = wide(**axes), target_positions()
    embedded, features = torch.randn(2, 1, COUNT, WIDTH, generator=torch.Generator().manual_seed(32))
    mask = torch.ones(COUNT, COUNT, dtype=torch.bool).tril()[None, None]
    want = rows_of_angelslim(network, embedded, features, places)

    def distance(given: Eagle3Network, placed: Tensor) -> float:
        rows, _ = given(embedded, features, placed, mask)
        return float((rows - want).abs().max() / want.abs().max())

    slots = torch.arange(COUNT).expand(3, 1, COUNT)
    assert distance(network, places) < 1e-5
    assert distance(network, slots) > 1e-2, "positions that count slots"
    assert distance(network, places[:1].expand(3, -1, -1)) > 1e-3, "time for every axis"
    assert distance(wide(), slots[0]) > 1e-2, "a layer with one axis"
    other = IN_SECTIONS if axes is not IN_SECTIONS else QWEN2_5
    assert distance(wide(**other), places) > 1e-3, "axes in another order"


def test_axes_of_angles() -> None:
    assert mrope_axes((2, 3, 3), False, 8) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert mrope_axes((3, 3, 2), True, 8) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert mrope_axes((5, 2, 1), True, 8) == [0, 1, 2, 0, 1, 0, 0, 0]
    assert mrope_axes((1, 9, 9), True, 8) == [0, 1, 2, 0, 1, 2, 0, 1], "as far as there is place"


@pytest.mark.parametrize(
    ("axes", "line"),
    [
        ({"mrope_section": (2, 3)}, "is not three numbers"),
        ({"mrope_section": "233"}, "is not three numbers"),
        ({"mrope_section": (2, 3, True)}, "is not three numbers"),
        ({"mrope_section": (2, 3, -1)}, "is not three numbers"),
        ({"mrope_section": (2, 3, 4)}, "whose sum is 8, half a head"),
        ({"mrope_section": (2, 3, 3), "mrope_interleaved": 1}, "neither true nor false"),
        ({"mrope_interleaved": True}, "without mrope_section"),
    ],
)
def test_sections_that_are_none(axes: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError, match=line):
        EagleConfig(WIDTH, 200, 3, 1, 16, 128, **axes)


def test_a_vispec_layer_has_one_axis() -> None:
    layer = EagleConfig(WIDTH, 200, 3, 1, 16, 128, mrope_section=(2, 3, 3))
    with pytest.raises(OptionError, match="its positions have one axis"):
        VispecConfig(layer, 3)


def test_one_axis_is_not_described(tmp_path: Path) -> None:
    """Folders and fingerprints of layers from before are what they were; those of layers with axes tell them."""
    target = {"name": "a", "fingerprint": "b", "num_layers": 2}
    plain = EagleDraft(network=EagleNetwork(EagleConfig(WIDTH, 200, 3, 1, 16, 128)), target=target)
    plain.save(tmp_path / "plain")
    assert "mrope" not in (tmp_path / "plain" / "draft.json").read_text("utf-8")
    assert "position" not in plain.entry("float32")
    config = EagleConfig(WIDTH, 200, 3, 1, 16, 128, mrope_section=(2, 3, 3))
    placed = EagleDraft(network=EagleNetwork(config), target=target)
    placed.save(tmp_path / "placed")
    assert EagleDraft.load(tmp_path / "placed").network.config == config
    assert placed.entry("float32")["position"] == "mrope"


@pytest.mark.parametrize("axes", [QWEN3, IN_SECTIONS], ids=["alternating", "in sections"])
def test_the_format_of_speculators_keeps_the_axes(tmp_path: Path, axes: dict[str, Any]) -> None:
    """Written and read again it is the same layer; who writes it is told that others may read one axis."""
    draft = Eagle3Draft(network=wide(**axes), target={"name": "a", "fingerprint": None, "num_layers": 2})
    document, tensors = draft.checkpoint("speculators", Verifier("a/b", ("C",)))
    (tmp_path / "config.json").write_text(json.dumps(document))
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    again = open_draft(tmp_path)
    assert isinstance(again, Eagle3Draft) and again.network.config == draft.network.config
    (line,) = draft.export_notices("speculators", None)  # type: ignore[arg-type]
    assert f"mrope_section {list(axes['mrope_section'])}" in line
    plain = Eagle3Draft(network=wide(), target=draft.target)
    assert not plain.export_notices("speculators", None)  # type: ignore[arg-type]
    assert (
        "rope_scaling"
        not in plain.checkpoint("speculators", Verifier("a/b", ("C",)))[0]["transformer_layer_config"]
    )
