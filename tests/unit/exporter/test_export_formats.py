"""Drafts go out in the layouts that vLLM and SGLang read, and come back bit for bit; heads compute what vLLM's class does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.drafts.eagle.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig, EagleNetwork
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft
from vlmexport.exporter.drafts.medusa.medusa_network import MedusaConfig, MedusaHeads
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.pipeline.export_draft import export_draft
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import ExportError, OptionError

from tests.support import tiny_models

LAYER = "layers.0."
ATTENTION = {f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo"}
FEED_FORWARD = {f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
AUTHORS = {"fc.weight", f"{LAYER}post_attention_layernorm.weight", *ATTENTION, *FEED_FORWARD}
"""Tensors of yuhuili/EAGLE-LLaMA3-Instruct-8B, whose `fc` has no bias, but for the table of embeddings."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def stirred(network: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.5)
    return network.eval()


def target_of(model: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(model)
    layers = family_for(checkpoint).decoder.num_layers
    return {"name": str(model), "fingerprint": fingerprint(checkpoint), "num_layers": layers}


def layer(model: Path, folder: Path, **options: Any) -> EagleDraft:
    vocabulary, width = family_for(open_checkpoint(model)).language.head.shape
    network = stirred(EagleNetwork(EagleConfig(width, vocabulary, 4, 2, 24, 64, **options)))
    draft = EagleDraft(network=network, target=target_of(model))
    draft.save(folder)
    return draft


def heads(model: Path, folder: Path, head: str, layers: int = 1) -> MedusaDraft:
    vocabulary, width = family_for(open_checkpoint(model)).language.head.shape
    trimmed = vocabulary // 2 if head == "trimmed" else None
    network = MedusaHeads(MedusaConfig(width, vocabulary, 3, layers, head, trimmed))
    stirred(network)
    if trimmed is not None:
        network.d2t.copy_(torch.randperm(vocabulary, generator=torch.Generator().manual_seed(7))[:trimmed])
    draft = MedusaDraft(network=network, target=target_of(model))
    draft.save(folder)
    return draft


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mrope", [None, (6, 4, 2)])
def test_an_eagle_layer_comes_back_from_its_authors_layout(
    model: Path, tmp_path: Path, bias: bool, mrope: tuple[int, int, int] | None
) -> None:
    axes = {} if mrope is None else {"mrope_section": mrope, "mrope_interleaved": True}
    options = {"fc_bias": bias, "qkv_bias": bias, "rope_theta": 20000.0, "norm_eps": 1e-5}
    draft = layer(model, tmp_path / "draft", **options, **axes)
    found = export_draft(tmp_path / "draft", tmp_path / "out", "eagle")
    biases = {"fc.bias", *(name.replace("weight", "bias") for name in ATTENTION if "o_proj" not in name)}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == AUTHORS | (biases if bias else set())
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (document["architectures"], document["num_hidden_layers"]) == (["LlamaForCausalLM"], 1)
    assert (document["bias"], document["qkv_bias"], document["head_dim"]) == (bias, bias, 24)
    assert document["trained_positions"] == ("slots" if mrope is None else "mrope")
    assert any("--no-fusion-bias" in notice for notice in found.notices) == bias
    assert any("three axes" in notice for notice in found.notices) == (mrope is not None)
    back = open_draft(tmp_path / "out")
    assert isinstance(back, EagleDraft) and back.network.config == draft.network.config
    assert back.fingerprint == draft.fingerprint


class VllmHeads(nn.Module):
    """What the class `Medusa` of vLLM computes from a checkpoint (vllm/model_executor/models/medusa.py), in PyTorch alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        assert self.config["architectures"] == ["MedusaModel"] and self.config["model_type"] == "medusa"
        self.used: set[str] = set()

    def take(self, name: str) -> Tensor:
        self.used.add(name)
        return self.tensors[name]

    def forward(self, hidden_states: Tensor) -> list[Tensor]:
        config, found = self.config, []
        for head in range(config["num_heads"]):
            x = hidden_states
            for layer in range(config["num_hidden_layers"]):
                name = f"blocks.{head}.layers.{layer}."
                bias = self.take(f"{name}bias") if config["medusa_fc_bias"] else None
                x = x + nn.functional.silu(nn.functional.linear(x, self.take(f"{name}weight"), bias))
            table = self.take(f"lm_heads.{0 if config['original_lm_head'] else head}.weight")
            logits = x @ table.t()
            if config.get("truncated_vocab_size", config["vocab_size"]) < config["vocab_size"]:
                whole = torch.full((*logits.shape[:-1], config["vocab_size"]), -torch.inf)
                whole[..., self.take("token_map")] = logits
                logits = whole
            found.append(logits)
        assert self.used == set(self.tensors), "a tensor that vLLM does not look for"
        return found


@pytest.mark.parametrize("head", ["own", "shared", "trimmed"])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_heads_are_those_of_vllm_and_come_back(
    model: Path, tmp_path: Path, head: str, layers: int
) -> None:
    draft = heads(model, tmp_path / "draft", head, layers)
    found = export_draft(tmp_path / "draft", tmp_path / "out", "medusa")
    assert (found.kind, found.format) == ("medusa", "medusa") and "no tree" in found.notices[0]
    back = open_draft(tmp_path / "out")
    assert isinstance(back, MedusaDraft) and back.fingerprint == draft.fingerprint
    kept = draft.network.config
    assert (back.network.config.head, back.network.config.trimmed) == (head, kept.trimmed)

    checkpoint = open_checkpoint(model)
    reference = family_for(checkpoint).language.head
    table = checkpoint.tensors.read(reference.names[0]).float()
    hidden_states = torch.randn(11, kept.hidden_size, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        mine = draft.network(hidden_states, table if head == "shared" else None)
        theirs = VllmHeads(tmp_path / "out")(hidden_states)
    for number, logits in enumerate(theirs):
        if kept.trimmed is not None:
            assert torch.isinf(logits).sum() == 11 * (len(table) - kept.trimmed)
            logits = logits[:, draft.network.d2t]
        assert (mine[:, number] - logits).abs().max() <= 1e-5


def test_heads_without_biases_and_with_whole_tables_are_read(model: Path, tmp_path: Path) -> None:
    """As vLLM takes them: no bias where the configuration has none, and rows of a whole LM head by the token map."""
    draft = heads(model, tmp_path / "draft", "trimmed")
    export_draft(tmp_path / "draft", tmp_path / "out", "medusa")
    path = tmp_path / "out" / "model.safetensors"
    tensors = {f"medusa_heads.{n}": t for n, t in load_file(path).items() if not n.endswith(".bias")}
    ids, words = draft.network.d2t, draft.network.config.vocab_size
    for number in range(3):
        whole = torch.randn(words or 0, draft.network.config.hidden_size)
        whole[ids] = tensors[f"medusa_heads.lm_heads.{number}.weight"]
        tensors[f"medusa_heads.lm_heads.{number}.weight"] = whole
    save_file(tensors, path)
    back = open_draft(tmp_path / "out").network  # type: ignore[attr-defined]
    for name, value in draft.network.state_dict().items():
        wanted = torch.zeros_like(value) if name.endswith("bias") else value
        assert torch.equal(back.state_dict()[name], wanted), name
    tensors["medusa_heads.token_map"] = ids + 10**6
    save_file(tensors, path)
    with pytest.raises(ExportError, match="token_map names ids outside"):
        open_draft(tmp_path / "out")
    tensors["medusa_heads.token_map"] = ids.float()
    save_file(tensors, path)
    with pytest.raises(ExportError, match="token_map is not a list of ids"):
        open_draft(tmp_path / "out")
    save_file({**tensors, "medusa_heads.token_map": ids, "medusa_heads.more": ids.clone()}, path)
    with pytest.raises(ExportError, match="the tensor more"):
        open_draft(tmp_path / "out")


def test_what_a_format_has_no_place_for_is_named(model: Path, tmp_path: Path) -> None:
    layer(model, tmp_path / "own", head="own")
    with pytest.raises(ExportError, match=r"no place for this draft's LM head \(own\).*--head shared"):
        export_draft(tmp_path / "own", tmp_path / "out", "eagle")
    with pytest.raises(
        ExportError, match=r"'medusa' has no place for a draft of kind 'eagle', only for medusa"
    ):
        export_draft(tmp_path / "own", tmp_path / "out", "medusa")
    heads(model, tmp_path / "heads", "own")
    for form in ("eagle", "speculators"):
        with pytest.raises(ExportError, match=f"'{form}' has no place for a draft of kind 'medusa'"):
            export_draft(tmp_path / "heads", tmp_path / "out", form)
    with pytest.raises(OptionError, match="choose one of speculators, eagle, medusa"):
        export_draft(tmp_path / "own", tmp_path / "out", "gguf")
    crossing = tiny_models.checkpoint("t5", tmp_path / "t5")
    heads(crossing, tmp_path / "crossing", "own")
    with pytest.raises(ExportError, match="vLLM drafts with Medusa for decoders alone"):
        export_draft(tmp_path / "crossing", tmp_path / "out", "medusa")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_each_format(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer(model, tmp_path / "eagle", fc_bias=False)
    heads(model, tmp_path / "medusa", "shared")
    for form in ("eagle", "medusa"):
        out = tmp_path / f"{form}-out"
        assert main(["export-draft", str(tmp_path / form), "--format", form, "-o", str(out), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["format"], found["kind"]) == (form, form)
