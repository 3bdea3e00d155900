"""EAGLE-1 and EAGLE-2 checkpoints as their authors publish them become drafts; those that do not fit are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vlmexport.exporter.drafts.common.trained import described
from vlmexport.exporter.drafts.eagle.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import ExportError, OptionError
from vlmexport.runtime.session.session import Session

from tests.support import tiny_models

WIDTH, VOCABULARY, INNER, HEADS, KV_HEADS = 96, 266, 64, 4, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
}


def published(
    folder: Path, *, bias: bool = True, qkv: bool = False, prefix: str = "", safe: bool = False, **config: Any
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint and returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    keys = WIDTH // HEADS * KV_HEADS
    shapes = {
        "embed_tokens.weight": (VOCABULARY, WIDTH),
        "fc.weight": (WIDTH, 2 * WIDTH),
        "layers.0.self_attn.q_proj.weight": (WIDTH, WIDTH),
        "layers.0.self_attn.k_proj.weight": (keys, WIDTH),
        "layers.0.self_attn.v_proj.weight": (keys, WIDTH),
        "layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),
        "layers.0.mlp.gate_proj.weight": (INNER, WIDTH),
        "layers.0.mlp.up_proj.weight": (INNER, WIDTH),
        "layers.0.mlp.down_proj.weight": (WIDTH, INNER),
        "layers.0.post_attention_layernorm.weight": (WIDTH,),
    } | ({"fc.bias": (WIDTH,)} if bias else {})
    if qkv:
        sizes = {"q": WIDTH, "k": keys, "v": keys}
        shapes |= {f"layers.0.self_attn.{each}_proj.bias": (size,) for each, size in sizes.items()}
    tensors = {
        f"{prefix}{name}": (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).half()
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if safe:
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose sizes the checkpoints have."""
    folder = tiny_models.checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"]) == (WIDTH, VOCABULARY)
    return folder


@pytest.mark.parametrize("form", [{}, {"bias": False, "safe": True, "prefix": "model."}, {"qkv": True}])
def test_a_published_checkpoint_becomes_a_draft(llama: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    tensors = published(tmp_path / "layer", **form)
    draft = open_draft(tmp_path / "layer")
    assert isinstance(draft, EagleDraft) and draft.network.config.rope_theta == 500000.0
    state = draft.network.state_dict()
    for name, value in tensors.items():
        name = name.removeprefix("model.")
        assert name == "embed_tokens.weight" or torch.equal(state[name], value.float())
    draft.save(tmp_path / "own")
    again = open_draft(tmp_path / "own")
    assert isinstance(again, EagleDraft) and again.fingerprint == draft.fingerprint
    assert ("qkv_bias" in described(draft.network.config)) == form.get("qkv", False)
    request = BuildRequest(
        model=str(llama), output=tmp_path / "bundle", drafts=[str(tmp_path / "layer")], max_length=64
    )
    report = build_bundle(request)
    assert "eagle" in {row["graph"] for row in report.parity}
    with Session.load(tmp_path / "bundle") as session:
        ids = [11, 70, 200, 41, 5]
        found = session.generate_tokens(ids, max_new_tokens=12, draft="eagle", draft_length=3)
        assert found.tokens == session.generate_tokens(ids, max_new_tokens=12, draft="none").tokens
        assert found.stats.proposed > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("fc.weight"),
            "there is no matrix fc.weight, so this is no layer of EAGLE-1 or EAGLE-2",
        ),
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "misses the tensor layers.0.mlp.up_proj.weight"),
        (
            lambda t: t.update({"midlayer.x": torch.zeros(1)}),
            "holds, beside one layer .* the tensor midlayer.x",
        ),
        (
            lambda t: t.update({"fc.weight": torch.zeros(WIDTH, WIDTH)}),
            r"fc.weight has shape \[96, 96\], not \[96, 192\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    tensors = published(tmp_path)
    change(tensors)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ExportError, match=message):
        open_draft(tmp_path)


def test_the_shape_is_in_the_tensors(tmp_path: Path) -> None:
    """Whatever config.json says of sizes, and however many rows a table has that is not read."""
    tensors = published(tmp_path)
    wanted = open_draft(tmp_path)
    torch.save(
        tensors | {"embed_tokens.weight": torch.zeros(VOCABULARY + 22, WIDTH)}, tmp_path / "pytorch_model.bin"
    )
    path = tmp_path / "config.json"
    told = {"num_key_value_heads": 3, "intermediate_size": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    assert open_draft(tmp_path).fingerprint == wanted.fingerprint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling .* is not supported in a draft"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64},
            "5 heads do not divide the width 96",
        ),
        ({"vocab_size": None}, "vocab_size None is not in"),
    ],
)
def test_configurations_that_do_not_fit_are_named(tmp_path: Path, config: Any, message: str) -> None:
    published(tmp_path, **config)
    with pytest.raises(ExportError, match=message):
        open_draft(tmp_path)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(OptionError, match="5 heads do not divide the width 96"):
        EagleConfig(
            hidden_size=96, vocab_size=9, num_heads=5, num_kv_heads=5, head_dim=8, intermediate_size=8, rope_theta=1e4,
            norm_eps=1e-6,
        )  # fmt: skip


def test_another_vocabulary_or_width_is_refused(llama: Path, tmp_path: Path) -> None:
    wider = tiny_models.checkpoint("llama", tmp_path / "wider", hidden_size=192)
    published(tmp_path / "layer")
    for model, message in (
        (wider, "width 96.* does not fit"),
        (llama, "was made for 300 tokens, the model has 266"),
    ):
        if model is llama:
            config = json.loads((tmp_path / "layer" / "config.json").read_text()) | {"vocab_size": 300}
            (tmp_path / "layer" / "config.json").write_text(json.dumps(config))
            tensors = torch.load(tmp_path / "layer" / "pytorch_model.bin", weights_only=True)
            del tensors["embed_tokens.weight"]
            torch.save(tensors, tmp_path / "layer" / "pytorch_model.bin")
        with pytest.raises(ExportError, match=message):
            build_bundle(
                BuildRequest(model=str(model), output=tmp_path / "b", drafts=[str(tmp_path / "layer")])
            )


def test_pickle_with_code_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ExportError, match=r"pytorch_model.bin cannot be read"):
        open_draft(tmp_path)
