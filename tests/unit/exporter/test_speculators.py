"""Drafts go out in the format of the package `speculators` and come back; what does not fit is named.

That the package itself loads them and gives the same logits shows `benchmarks/export_draft.py`, in an environment of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.drafts.eagle.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig, EagleNetwork
from vlmexport.exporter.drafts.eagle.speculators_format import read_verifier
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.export_draft import export_draft
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import ExportError, OptionError
from vlmexport.runtime.drafts.combined import FallbackProposer
from vlmexport.runtime.session.session import Session

from tests.support import tiny_models

WIDTH, VOCABULARY, INNER = 96, 266, 64
ATTENTION = [f"transformer.self_attn.{part}_proj.weight" for part in "qkvo"]
FEED_FORWARD = [f"transformer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
TENSORS = {"fusion_fc.weight", "transformer.post_attention_layernorm.weight", *ATTENTION, *FEED_FORWARD}
"""Of the class EagleSpeculator, version 0.2.0, with fusion_bias false."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def layer(model: Path, folder: Path, **options: Any) -> EagleDraft:
    """A draft folder for `model` with random weights."""
    config = EagleConfig(WIDTH, VOCABULARY, 4, 2, 24, INNER, **options)
    network = EagleNetwork(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.5)
    target = {"name": str(model), "fingerprint": fingerprint(open_checkpoint(model)), "num_layers": 4}
    draft = EagleDraft(network=network, target=target)
    draft.save(folder)
    return draft


def changed(folder: Path, **fields: Any) -> None:
    """Sets fields of a checkpoint's configuration; `verifier` is that of `speculators_config`."""
    path = folder / "config.json"
    found = json.loads(path.read_text())
    found["speculators_config"]["verifier"] |= fields.pop("verifier", {})
    found["transformer_layer_config"] |= fields.pop("inner", {})
    path.write_text(json.dumps(found | fields))


@pytest.mark.parametrize("bias", [True, False])
def test_draft_round_trip_through_speculators(llama: Path, tmp_path: Path, bias: bool) -> None:
    draft = layer(llama, tmp_path / "draft", fc_bias=bias, rope_theta=20000.0, norm_eps=1e-5)
    found = export_draft(tmp_path / "draft", tmp_path / "out", "speculators")
    names = TENSORS | ({"fusion_fc.bias"} if bias else set())
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == names
    assert found.parameters == sum(value.numel() for value in draft.network.parameters())
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    inner = document["transformer_layer_config"]
    assert (document["speculators_model_type"], document["fusion_bias"]) == ("eagle", bias)
    assert (document["speculators_config"]["algorithm"], document["layernorms"]) == ("eagle", False)
    assert (inner["head_dim"], inner["rope_theta"], inner["rms_norm_eps"]) == (24, 20000.0, 1e-5)
    assert inner["max_position_embeddings"] == open_checkpoint(llama).config.max_position_embeddings
    back = open_draft(tmp_path / "out")
    assert isinstance(back, EagleDraft) and back.network.config == draft.network.config
    assert back.fingerprint == draft.fingerprint
    assert read_verifier(tmp_path / "out").architectures == ("LlamaForCausalLM",)


def test_a_checkpoint_of_speculators_drafts_in_a_bundle(llama: Path, tmp_path: Path) -> None:
    layer(llama, tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", "speculators")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(VOCABULARY, WIDTH)  # the target's own is read
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    request = BuildRequest(
        model=str(llama), output=tmp_path / "bundle", drafts=[str(tmp_path / "out")], max_length=64
    )
    report = build_bundle(request)
    assert "eagle" in {row["graph"] for row in report.parity}
    with Session.load(tmp_path / "bundle") as session:
        ids = [11, 70, 200, 41, 5]
        found = session.generate_tokens(ids, max_new_tokens=12, draft="eagle", draft_length=3)
        assert found.tokens == session.generate_tokens(ids, max_new_tokens=12, draft="none").tokens
        assert found.stats.proposed > 0
        check_combination(session)


def check_combination(session: Session) -> None:
    """Prompt lookup first, else this layer, alone and beside others: the tokens of plain decoding, and both propose."""
    prompts = [[11, 70, 200, 41, 11, 70, 200, 41, 11, 70], [5, 9, 30, 31, 60]]
    plain = [session.generate_tokens(ids, max_new_tokens=24, draft="none").tokens for ids in prompts]
    name = "prompt-lookup+eagle"
    for ids, wanted in zip(prompts, plain, strict=True):
        for options in ({"draft_length": 3}, {"draft_length": 3, "draft_nodes": 6}, {}):
            found = session.generate_tokens(ids, max_new_tokens=24, draft=name, **options)
            assert (found.tokens, found.stats.draft) == (wanted, name)
    combined = session.proposer(name)
    assert isinstance(combined, FallbackProposer)
    asked: list[int] = []
    second = combined._second.propose
    combined._second.propose = lambda *given: asked.append(1) or second(*given)  # type: ignore[method-assign]
    found = session.generate_tokens(prompts[0], max_new_tokens=24, draft=name, draft_length=3)
    assert 0 < len(asked) < found.stats.cycles, "one of the two proposed everything"


def test_the_command_says_what_it_wrote(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer(llama, tmp_path / "draft")
    line = ["export-draft", str(tmp_path / "draft"), "--format", "speculators", "-o"]
    assert main([*line, str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["verifier"], found["architectures"]) == (
        "eagle",
        str(llama.absolute()),
        ["LlamaForCausalLM"],
    )
    (notice,) = found["notices"]  # the tiny model has heads of another size
    assert "base 10000 and 24 units" in notice and "32 units" in notice
    assert main([*line, str(tmp_path / "out")]) == 2
    assert "exists; choose another -o" in capsys.readouterr().err
    assert main([*line, str(tmp_path / "other")]) == 0
    shown = capsys.readouterr().out
    assert "other: eagle for" in shown.replace("\n", "") and "gives other logits there" in " ".join(
        shown.split()
    )


def test_drafts_that_the_format_cannot_hold_are_named(llama: Path, tmp_path: Path) -> None:
    layer(llama, tmp_path / "own", head="own")
    with pytest.raises(ExportError, match=r"no place for this draft's LM head \(own\).*--head shared"):
        export_draft(tmp_path / "own", tmp_path / "out", "speculators")
    layer(llama, tmp_path / "biased", qkv_bias=True)
    with pytest.raises(ExportError, match="no place for biases of queries, keys and values"):
        export_draft(tmp_path / "biased", tmp_path / "out", "speculators")
    bundled = (
        Path(open_checkpoint("tiny-blip2-flant5").folder).parent / "drafts" / "tiny-blip2-flant5" / "medusa"
    )
    with pytest.raises(ExportError, match=r"no rotary positions"):
        export_draft(bundled, tmp_path / "out", "speculators")
    layer(llama, tmp_path / "draft")
    with pytest.raises(OptionError, match="--format 'gguf' is unknown"):
        export_draft(tmp_path / "draft", tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_speculators_draft_of_another_target_is_refused(llama: Path, tmp_path: Path) -> None:
    layer(llama, tmp_path / "draft")
    other = tiny_models.checkpoint("llama", tmp_path / "other", seed=7)
    with pytest.raises(ExportError, match=r"trained for .*llama.*, not for .*other"):
        export_draft(tmp_path / "draft", tmp_path / "out", "speculators", str(other))
    path = tmp_path / "draft" / "draft.json"
    document = json.loads(path.read_text())
    for name, message in (
        ("", "does not say which model.*--model"),
        ("gone", "'gone', is not here.*--model"),
    ):
        path.write_text(json.dumps(document | {"target": document["target"] | {"name": name}}))
        with pytest.raises(OptionError, match=message):
            export_draft(tmp_path / "draft", tmp_path / "out", "speculators")
    export_draft(tmp_path / "draft", tmp_path / "out", "speculators", str(llama))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layernorms": True}, "layernorms true is not supported"),
        ({"fusion_bias": "yes"}, "fc_bias 'yes' is neither true nor false"),
        ({"fusion_bias": False}, "holds, beside a layer of the type 'eagle', the tensor fc.bias"),
        ({"transformer_layer_config": 3}, "transformer_layer_config 3 is not an object"),
        ({"inner": {"head_dim": 5}}, "head_dim 5 is odd"),
        ({"inner": {"rope_parameters": {"rope_type": "llama3"}}}, "llama3.* is not supported in a draft"),
        ({"verifier": {"architectures": "x"}}, "is not a name and a list of class names"),
        ({"speculators_model_type": "mlp"}, "speculators of type 'mlp'; this version reads eagle"),
    ],
)
def test_checkpoints_that_do_not_fit_are_named(
    llama: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    layer(llama, tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", "speculators")
    changed(tmp_path / "out", **fields)
    with pytest.raises(ExportError, match=message):
        open_draft(tmp_path / "out")


def test_padded_tables_that_are_not_read_are_accepted(llama: Path, tmp_path: Path) -> None:
    layer(llama, tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", "speculators")
    tensors, wanted = load_file(tmp_path / "out" / "model.safetensors"), open_draft(tmp_path / "out")
    padded = torch.zeros(VOCABULARY + 22, WIDTH)
    save_file(
        tensors | {"lm_head.weight": padded, "embed_tokens.weight": padded.clone()},
        tmp_path / "out" / "model.safetensors",
    )
    assert open_draft(tmp_path / "out").fingerprint == wanted.fingerprint


def test_the_verifier_that_a_checkpoint_names_is_compared(llama: Path, tmp_path: Path) -> None:
    layer(llama, tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", "speculators")
    changed(tmp_path / "out", verifier={"architectures": ["OPTForCausalLM"]})
    request = BuildRequest(model=str(llama), output=tmp_path / "b", drafts=[str(tmp_path / "out")])
    with pytest.raises(ExportError, match=r"made for OPTForCausalLM, .* is a LlamaForCausalLM"):
        build_bundle(request)
    changed(tmp_path / "out", verifier={"name_or_path": "Some/Other-1B"})
    draft = open_draft(tmp_path / "out")
    for model, fits in (
        (str(llama), True),
        ("some/other-1b", True),
        ("some/third", False),
        ("smollm2-135m", False),
    ):
        if fits:
            draft.check_target(model, "sha256:0", 4, WIDTH)
            continue
        with pytest.raises(ExportError, match=r"made for Some/Other-1B, not for .*give a local folder"):
            draft.check_target(model, "sha256:0", 4, WIDTH)
