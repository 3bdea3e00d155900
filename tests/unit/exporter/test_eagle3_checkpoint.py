"""EAGLE-3 checkpoints as their authors, ModelOpt and speculators publish them become drafts, and go out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.drafts.eagle.eagle3 import Eagle3Draft
from vlmexport.exporter.drafts.eagle.eagle3_network import default_taps
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.export_draft import export_draft
from vlmexport.runtime.common.errors import ExportError
from vlmexport.runtime.session.session import Session

from tests.support import tiny_models

WIDTH, VOCABULARY, FEW, INNER, HEADS, KV_HEADS, SIZE = 96, 266, 200, 64, 4, 2, 24
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": FEW,
}


def published(folder: Path, *, layer: str = "midlayer.", few: bool = True, **config: Any) -> dict[str, Any]:
    """Writes a checkpoint and returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    words = FEW if few else VOCABULARY
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        f"{layer}self_attn.q_proj.weight": (HEADS * SIZE, 2 * WIDTH),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * SIZE, 2 * WIDTH),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * SIZE, 2 * WIDTH),
        f"{layer}self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        f"{layer}mlp.gate_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.up_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, INNER),
        **{
            f"{layer}{norm}.weight": (WIDTH,)
            for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        "norm.weight": (WIDTH,),
        "lm_head.weight": (words, WIDTH),
    }
    tensors: dict[str, Any] = {
        name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).half()
        for name, shape in shapes.items()
    }
    if few:
        ids = torch.randperm(VOCABULARY, generator=generator)[:FEW].sort().values
        tensors |= {"d2t": ids - torch.arange(FEW), "t2d": torch.isin(torch.arange(VOCABULARY), ids)}
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 5 layers, whose default taps are 1, 2 and 4."""
    return tiny_models.checkpoint("llama", tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=5)


def test_default_taps() -> None:
    assert default_taps(32) == (2, 16, 29) and default_taps(8) == (2, 4, 5)
    assert [default_taps(n) for n in (2, 3, 5, 7)] == [(1, 1, 1), (1, 1, 2), (1, 2, 4), (1, 3, 6)]


@pytest.mark.parametrize(
    ("form", "taps"),
    [
        ({}, None),
        ({"few": False, "draft_vocab_size": None}, None),
        ({"layer": "layers.0.", "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1, 0]}}, (1, 2, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, (1, 2, 3)),
    ],
)
def test_a_published_checkpoint_becomes_a_draft(tmp_path: Path, form: dict[str, Any], taps: Any) -> None:
    tensors = published(tmp_path, **form)
    draft = open_draft(tmp_path)
    assert isinstance(draft, Eagle3Draft)
    config, state = draft.network.config, draft.network.state_dict()
    assert (config.taps, config.rope_theta, config.vocab_size) == (taps, 500000.0, VOCABULARY)
    for name, value in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        ours = name.replace("midlayer.", "layers.0.").replace("lm_head.", "head.")
        assert torch.equal(state[ours], value.float()), name
    if "d2t" in tensors:
        assert config.trimmed == FEW
        assert torch.equal(draft.network.d2t, torch.arange(VOCABULARY)[tensors["t2d"]])


SECTIONS = {"mrope_section": [4, 4, 4]}
ALTERNATING = SECTIONS | {"mrope_interleaved": True}
ANGELSLIM = {"architectures": ["Eagle3LlamaForCausalLM"]}
ROPES: list[tuple[dict[str, Any], float, bool | None]] = [
    ({}, 500000.0, None),
    ({"rope_scaling": None, "rope_theta": 7}, 7, None),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
    ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "default"}}, 1e6, None),
    ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": None}, 1e6, None),
    ({"rope_scaling": {"type": "mrope"} | SECTIONS}, 500000.0, False),
    ({"rope_scaling": {"rope_type": "mrope"} | SECTIONS}, 500000.0, False),
    ({"rope_scaling": {"type": "default"} | SECTIONS}, 500000.0, False),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6} | SECTIONS}, 1e6, False),
    ({"rope_scaling": {"type": "default"} | ALTERNATING}, 500000.0, True),
    ({"rope_parameters": {"rope_theta": 1e6} | ALTERNATING}, 1e6, True),
    (ANGELSLIM | {"rope_scaling": {"type": "mrope"} | SECTIONS}, 500000.0, True),
    (ANGELSLIM, 500000.0, None),
]
"""What a configuration says, θ, and whether three axes alternate (None: there is one)."""


@pytest.mark.parametrize(("told", "theta", "alternate"), ROPES)
def test_rotary_positions_in_every_spelling(
    tmp_path: Path, told: dict[str, Any], theta: float, alternate: bool | None
) -> None:
    published(tmp_path, **told)
    draft = open_draft(tmp_path)
    assert isinstance(draft, Eagle3Draft)
    config = draft.network.config
    assert config.rope_theta == theta and not draft.notices
    assert (config.mrope_section, config.mrope_interleaved) == (
        (None, False) if alternate is None else ((4, 4, 4), alternate)
    )


def test_mrope_without_its_sections_is_refused(tmp_path: Path) -> None:
    published(tmp_path, rope_scaling={"type": "mrope"})
    with pytest.raises(ExportError, match="M-RoPE without mrope_section; give it as"):
        open_draft(tmp_path)


def test_the_shape_is_in_the_tensors(tmp_path: Path) -> None:
    """Whatever config.json says of sizes, and whatever lies beside that is not read."""
    tensors = published(tmp_path)
    beside = {"embed_tokens.weight": torch.zeros(VOCABULARY + 22, WIDTH)} | {
        f"midlayer.self_attn.rotary_emb.{name}": torch.zeros(4) for name in ("inv_freq", "cos_cached", "sin_cached")
    }  # fmt: skip
    torch.save(tensors | beside, tmp_path / "pytorch_model.bin")
    wanted = open_draft(tmp_path)
    wrong = dict.fromkeys(("num_key_value_heads", "intermediate_size", "draft_vocab_size"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | wrong | {"vocab_size": VOCABULARY + 22}))
    found = open_draft(tmp_path)
    assert isinstance(found, Eagle3Draft) and found.fingerprint == wanted.fingerprint
    torch.save(tensors | {"midlayer.extra": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ExportError, match=r"holds, beside one layer of EAGLE-3, the tensor layers\.0\.extra"):
        open_draft(tmp_path)


def test_eagle3_round_trip_through_a_bundle(llama: Path, tmp_path: Path) -> None:
    published(tmp_path / "layer")
    request = BuildRequest(
        model=str(llama), output=tmp_path / "bundle", drafts=[str(tmp_path / "layer")], max_length=64
    )
    report = build_bundle(request)
    assert report.cuts == [0, 1, 2, 4, 5]
    assert {"eagle3", "fusion"} <= {row["graph"] for row in report.parity}
    with Session.load(tmp_path / "bundle") as session:
        (entry,) = [draft for draft in session.bundle.manifest.drafts if draft.kind == "eagle3"]
        assert entry.options.tap_layers == [1, 2, 4]
        ids = [11, 70, 200, 41, 5]
        plain = session.generate_tokens(ids, max_new_tokens=16, draft="none").tokens
        for name in ("eagle3", "prompt-lookup+eagle3"):
            for options in ({"draft_length": 3}, {"draft_length": 3, "draft_nodes": 6}):
                found = session.generate_tokens(ids, max_new_tokens=16, draft=name, **options)
                assert found.tokens == plain and found.stats.proposed > 0
    draft = open_draft(tmp_path / "layer").fitted(5)
    draft.save(tmp_path / "folder")
    export_draft(tmp_path / "folder", tmp_path / "out", "speculators", str(llama))
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["speculators_model_type"] == "eagle3" and document["draft_vocab_size"] == FEW
    assert document["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    tensors, given = load_file(tmp_path / "out" / "model.safetensors"), published(tmp_path / "again")
    assert torch.equal(tensors["d2t"], given["d2t"]) and torch.equal(tensors["t2d"], given["t2d"])
    assert {name.replace("layers.0.", "midlayer.") for name in tensors} == set(given)
    back = open_draft(tmp_path / "out")
    assert isinstance(back, Eagle3Draft) and back.fingerprint == draft.fingerprint
    with pytest.raises(ExportError, match="rows after layers 1, 2, 4, the model has 4 layers"):
        back.fitted(4)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"norm_before_fc": True}, {}, "norm_before_fc true is not supported"),
        ({"norm_output": True}, {}, "norm_output true is not supported"),
        ({"target_hidden_size": 128}, {}, "a target of width 128 is not supported, the layer has 96"),
        ({"norm_before_residual": 3}, {}, "norm_before_residual 3 is neither true nor false"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, {}, r"taps \(3, 2, 1\) do not rise"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, r"taps \(1, 2\) are not three numbers"),
        ({"eagle_aux_hidden_state_layer_ids": 2}, {}, "layer_ids 2 is not a list"),
        *[
            ({**form}, {}, "is not supported in a draft, only plain rotary")
            for kind in ("llama3", "linear", "yarn", 3)
            for form in (
                {"rope_scaling": {"type": kind}},
                {"rope_scaling": {"rope_type": kind}},
                {"rope_parameters": {"rope_type": kind, "rope_theta": 1e6}},
            )
        ],
        ({"rope_scaling": [1]}, {}, r"rope_scaling \[1\] is not an object"),
        ({"rope_parameters": "plain"}, {}, "rope_parameters 'plain' is not an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, {}, "only plain rotary"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            {},
            "partial_rotary_factor 0.5 is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor 0.5 is not supported"),
        ({}, {"d2t": torch.full((FEW,), 100)}, "d2t does not name different tokens of 266"),
        ({}, {"d2t": torch.zeros(3, dtype=torch.long)}, r"d2t has shape \[3\]"),
        ({}, {"d2t": None}, "there is no d2t, but 200 of 266 tokens"),
        ({}, {"norm.weight": None}, "misses the tensor norm.weight"),
        (
            {},
            {"fc.weight": torch.zeros(WIDTH, 2 * WIDTH)},
            r"fc.weight has shape \[96, 192\], not \[96, 288\]",
        ),
        (
            {},
            {"midlayer.self_attn.q_proj.bias": torch.zeros(96)},
            "the tensor layers.0.self_attn.q_proj.bias",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_are_named(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    tensors = published(tmp_path, **config) | change
    kept = {name: value for name, value in tensors.items() if value is not None}
    torch.save(kept, tmp_path / "pytorch_model.bin")
    with pytest.raises(ExportError, match=message):
        open_draft(tmp_path)


def test_eagle3_of_another_target_is_refused(llama: Path, tmp_path: Path) -> None:
    published(tmp_path / "layer")
    draft = open_draft(tmp_path / "layer")
    draft.target |= {"name": "other", "fingerprint": "sha256:1"}  # type: ignore[attr-defined]
    with pytest.raises(ExportError, match="trained for 'other'"):
        draft.check_target(str(llama), fingerprint(open_checkpoint(llama)), 5, WIDTH)
