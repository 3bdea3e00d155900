"""`build_bundle`: what is written, what is refused, and that a failure leaves everything as it was."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene, score_told
from vlmexport.exporter.checkpoint import TensorFiles, fingerprint, open_checkpoint
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft, ImitationNetwork
from vlmexport.exporter.families.common.base import Family
from vlmexport.exporter.families.common.images import square_image
from vlmexport.exporter.families.llama import LlamaFamily
from vlmexport.exporter.output import exchange
from vlmexport.exporter.output import folder as output_folder
from vlmexport.exporter.output.leftovers import remove_leftovers
from vlmexport.exporter.pipeline import BuildReport, BuildRequest, build_bundle
from vlmexport.exporter.pipeline import build as build_module
from vlmexport.exporter.pipeline import prepare as prepare_module
from vlmexport.exporter.pipeline.checks import SPARE_BYTES, estimated_bytes
from vlmexport.exporter.pipeline.dry_run import dry_run
from vlmexport.exporter.pipeline.text import describe_text
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest_changes import store_costs
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import (
    ExportError,
    OptionError,
    UnsupportedModelError,
    VlmexportError,
)

from tests.support import handmade_bundle

Checkpoints = Callable[..., Path]
Bundles = Callable[..., tuple[Path, Path]]


def build(model: Path | str, output: Path, progress=None, **options: object) -> BuildReport:
    return build_bundle(BuildRequest(model=str(model), output=output, parity=False, **options), progress)  # type: ignore[arg-type]


@pytest.fixture
def llama(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture
def changed(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the checkpoint with other values in config.json."""

    def make(**changes: object) -> Path:
        folder = shutil.copytree(llama, tmp_path / "changed")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return make


# --- what is written ---


@pytest.mark.parametrize("name", ["llama", "llama-tied", "t5", "blip2-t5"])
def test_every_weight_is_stored_once(name: str, tiny_bundle: Bundles) -> None:
    path, source = tiny_bundle(name)
    bundle = Bundle.open(path, check="sha256")
    tensors: dict[str, int] = {}
    for shard in open_checkpoint(source).tensors.shards:
        for key, tensor in load_file(shard).items():
            tensors[key] = tensor.numel()
    numbers = bundle.manifest.model.parameters
    assert numbers <= sum(tensors.values()) and numbers >= 0.97 * sum(tensors.values())
    ranges: set[tuple[int, int]] = {(t.offset, t.bytes) for t in bundle.manifest.tensors.values()}
    for graph in path.glob("*.onnx"):
        model = onnx.load(graph, load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.external_data:
                entry = {e.key: e.value for e in tensor.external_data}
                assert entry["location"] == "weights.bin"
                ranges.add((int(entry["offset"]), int(entry["length"])))
            else:
                assert len(tensor.SerializeToString()) < 1200
    ordered = sorted(ranges)
    for (start, length), (after, _) in itertools.pairwise(ordered):
        assert start + length <= after  # no overlap: the same tensor always has the same range
    assert sum(length for _, length in ordered) == 4 * numbers
    for start, length in ordered:
        assert start % (4096 if length >= 65536 else 64) == 0


@pytest.mark.slow  # the README's commands build it, too
def test_the_bundled_model_with_its_heads_from_a_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads need no --draft-layer; the bundle is little more than its parameters."""
    words = [
        "build",
        "--model",
        "tiny-blip2-flant5",
        "--draft",
        "medusa",
        "-o",
        str(tmp_path / "bundle"),
        "--json",
    ]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] <= 1.05 * 4 * (report["parameters"] + report["draft_parameters"])
    manifest = Bundle.open(tmp_path / "bundle", check="sha256").manifest  # files of several blocks
    assert [(draft.name, draft.trained) for draft in manifest.drafts if draft.graphs] == [("medusa", True)]
    assert manifest.policy.draft == "medusa" and manifest.decoder.cuts == [0, 12]
    assert manifest.text.default_prompt == "describe the scene" and manifest.text.image_rows == 8
    assert manifest.image is not None and manifest.image.resample == "bicubic"


def test_the_bundled_captioner_tells_what_it_sees_with_every_draft(tmp_path: Path) -> None:
    """A trained model without a prompt, through the runtime: true facts, the same tokens, drafts that are accepted."""
    report = build("tiny-vit-gpt2", tmp_path / "bundle", drafts=["medusa", "imitation"], draft_layer=3)
    assert report.bytes <= 1.05 * 4 * (report.parameters + report.draft_parameters)
    with Session.load(tmp_path / "bundle") as session:
        assert session.bundle.manifest.text.default_prompt is None
        for index in HELDOUT[:2]:
            scene = sample_scene(0, index)
            plain = session.generate(image=render(scene), max_new_tokens=160, speculative=False)
            assert plain.finish_reason == "eos" and score_told(plain.text, scene).accuracy() >= 0.75
            for draft, alpha in {"medusa": 0.75, "imitation@3": 0.7, "early-exit@3": 0.1}.items():
                found = session.generate(image=render(scene), max_new_tokens=160, draft=draft, draft_length=4)
                assert found.tokens == plain.tokens
                assert found.stats.alpha is not None and found.stats.alpha >= alpha


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_shards_become_float32(
    dtype: torch.dtype, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama", num_hidden_layers=2, dtype=dtype, max_shard_size="100KB")
    tensors = open_checkpoint(source).tensors
    assert len(tensors.shards) > 2
    build(source, tmp_path / "bundle", draft_layer=1)
    bundle = Bundle.open(tmp_path / "bundle")
    table = tensors.read("model.embed_tokens.weight").float().numpy()
    np.testing.assert_array_equal(bundle.tensor("embedding_table"), table)


def test_bin_checkpoints_are_read_without_running_code(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "bin")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    build(folder, tmp_path / "bundle", draft_layer=1)
    build(llama, tmp_path / "other", draft_layer=1)
    assert (tmp_path / "bundle/weights.bin").stat().st_size == (tmp_path / "other/weights.bin").stat().st_size
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple:
            return Path.touch, (marker,)

    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ExportError, match="save the tensors as safetensors"):
        build(folder, tmp_path / "third")
    assert not marker.exists()


def test_a_fingerprint_is_of_every_name_type_shape_and_number_but_not_of_the_files(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3), "c": torch.full((4,), 2.0)}

    def found(tensors: dict[str, torch.Tensor], shards: int = 1) -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        names = list(tensors)
        files = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return fingerprint(TensorFiles(folder))

    changed = [{**tensors, name: torch.cat([t.flatten()[:-1], torch.tensor([9.0])]).view(t.shape)}
               for name, t in tensors.items()]  # fmt: skip
    changed += [
        {**tensors, "a": tensors["a"].view(torch.int32)},
        {**tensors, "b": tensors["b"].view(3, 2)},
        {"A": tensors["a"], "b": tensors["b"], "c": tensors["c"]},
        {"a": tensors["a"], "b": tensors["b"]},
    ]
    assert len({found(tensors), *map(found, changed)}) == 1 + len(changed)
    assert found(tensors) == found(tensors, shards=2) == found(dict(reversed(tensors.items())), shards=3)


def test_special_tokens_come_from_the_generation_config(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    tokens = {"eos_token_id": [7, 9], "pad_token_id": 5, "bos_token_id": 3}
    (folder / "generation_config.json").write_text(json.dumps(tokens))
    checkpoint = open_checkpoint(folder)
    text = describe_text(checkpoint, LlamaFamily(checkpoint), None)
    assert (text["eos_token_ids"], text["pad_token_id"], text["bos_token_id"]) == ([7, 9], 5, 3)


def test_image_settings_are_the_processors_own() -> None:
    own = {"resample": 2, "rescale_factor": 0.5, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    found = square_image(
        {**own, "size": {"height": 32, "width": 48}}, (32, 48), "blip", BlipImageProcessorPil
    )
    assert found == {
        "processor": "blip", "height": 32, "width": 48, "resample": "bilinear", "rescale_factor": 0.5,
        "mean": own["image_mean"], "std": own["image_std"], "reference": "BlipImageProcessorPil",
    }  # fmt: skip


# --- drafts ---


def imitation(checkpoint: Path, folder: Path, layer: int, width: int = 96) -> Path:
    torch.manual_seed(0)
    network = ImitationNetwork(width)
    torch.nn.init.normal_(network.linear[-1].weight, std=0.1)
    identity = {"name": "tiny", "fingerprint": fingerprint(open_checkpoint(checkpoint)), "num_layers": 4}
    ImitationDraft(network=network, layer=layer, target=identity).save(folder)
    return folder


def test_imitation_draft(llama: Path, tmp_path: Path) -> None:
    from tests.support.graph_runner import GraphRunner, close

    folder = imitation(llama, tmp_path / "draft", 2)
    report = build(llama, tmp_path / "bundle", drafts=[str(folder)])
    assert (
        report.cuts == [0, 2, 4]
        and report.drafts == ["imitation@2", "early-exit@2", "prompt-lookup"]
        and report.speculative
    )
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert manifest.policy.draft == "imitation@2" and manifest.drafts[0].graphs == {
        "imitation": "imitation.2"
    }
    hidden = torch.randn(2, 3, 96)
    with torch.no_grad():
        expected = ImitationDraft.load(folder).network(hidden).numpy()
    close(GraphRunner(tmp_path / "bundle").run("imitation.2", hidden=hidden.numpy())["hidden_out"], expected)


def test_two_drafts_cut_twice(llama: Path, tmp_path: Path) -> None:
    folders = [str(imitation(llama, tmp_path / f"draft{n}", n)) for n in (3, 1)]
    report = build(llama, tmp_path / "bundle", drafts=folders)
    assert report.cuts == [0, 1, 3, 4]
    assert report.drafts == [
        "imitation@3", "imitation@1", "early-exit@1", "early-exit@3", "prompt-lookup",
    ]  # fmt: skip


def test_draft_of_another_target_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    folder = imitation(llama, tmp_path / "draft", 2)
    other = shutil.copytree(llama, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3  # one number changed: another model
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"trained for 'tiny' .*not for"):
        build(other, tmp_path / "bundle", drafts=[str(folder)])
    assert not (tmp_path / "bundle").exists()


def test_build_without_a_trained_draft(llama: Path, tmp_path: Path) -> None:
    report = build(llama, tmp_path / "bundle", draft_layer=2)
    assert report.drafts == ["early-exit@2", "prompt-lookup"] and report.speculative
    assert "vlmexport train" in report.notices[0] and "--draft-layer 2" in report.notices[0]
    policy = Bundle.open(tmp_path / "bundle").manifest.policy
    assert (policy.draft, policy.draft_length) == ("prompt-lookup", 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_layer": 4}, r"4 is out of range.*1\.\.3.*at most 2"),
        ({"draft_layer": 0}, r"out of range"),
        ({"drafts": ["medusa2"]}, "'medusa2' is neither a kind"),
        ({"drafts": ["imitation"], "draft_layer": 1}, "no trained imitation draft"),
        ({"drafts": ["none", "early-exit"]}, "excludes"),
        ({"drafts": ["early-exit", "early-exit"]}, "given twice"),
        ({"precision": "float8"}, "'float8' is unknown"),
        ({"max_length": 100_000}, "beyond the model's 512"),
        ({"max_width": 1}, "--max-width 1 is out of range"),
        ({"verify_width": 1}, "--verify-width 1 is out of range"),
        ({"verify_width": 17}, "--verify-width 17 is above --max-width 16"),
    ],
)
def test_bad_options(options: dict, message: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        build(llama, tmp_path / "bundle", **options)
    assert list(tmp_path.iterdir()) == []


def test_smallest_width_that_can_draft(llama: Path, tmp_path: Path) -> None:
    """Two rows a pass: the pending token and one that is drafted; parity tells the graphs no more of a text than these."""
    folder = tmp_path / "bundle"
    build_bundle(BuildRequest(model=str(llama), output=folder, draft_layer=1, max_width=2))
    with Session.load(folder) as session:
        want = session.generate(prompt="a red cup", max_new_tokens=8, draft="none").tokens
        assert session.generate(prompt="a red cup", max_new_tokens=8, draft="early-exit").tokens == want
        with pytest.raises(OptionError, match="draft_length: 2 is above 1"):
            session.generate(prompt="a red cup", draft="early-exit", draft_length=2)


# --- models that are refused ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": None}, "no 'architectures'.*LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "'proportional'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported, only llama"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000 is not in 1\.\.1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads=0 is not .*correct config\.json"),
        ({"head_dim": -32}, r"head_dim=-32 is not .*correct config\.json"),
        ({"hidden_act": "evil"}, "KeyError: 'evil'.*correct config.json"),
        ({"architectures": [3]}, "3 .*is not supported"),
        ({"architectures": 1}, "architectures=1 is not a list"),
        ({"architectures": {"a": 1}}, "architectures={'a': 1} is not a list"),
        ({"dtype": 1.5}, r"dtype=1\.5 is no type of numbers"),
        ({"dtype": "float31"}, "no attribute 'float31'"),
        ({"head_dim": 1e12}, "head_dim.*expected int"),
    ],
)
def test_unsupported_options_are_named(
    changes: dict, message: str, changed: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        build(changed(**changes), tmp_path / "bundle")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_window=64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*'sliding_attention'"),
    ],
)
def test_windows_of_a_qwen3_are_refused_unless_they_are_switched_off(
    changes: dict, message: str, tiny_checkpoint: Callable, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "model"))
    document = json.loads((source / "config.json").read_text())
    del document["layer_types"]  # as published: they follow from the other fields
    off = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    (source / "config.json").write_text(json.dumps(document | off))
    dry_run(BuildRequest(model=str(source), output=tmp_path / "off", draft_layer=1))
    (source / "config.json").write_text(json.dumps(document | changes))
    with pytest.raises(UnsupportedModelError, match=message):
        dry_run(BuildRequest(model=str(source), output=tmp_path / "on", draft_layer=1))


@pytest.mark.parametrize(
    ("name", "part"), [("llama", None), ("blip2-t5", "text_config"), ("blip2-t5", "vision_config")]
)
def test_an_activation_that_the_runtime_cannot_run_is_refused_before_anything_is_traced(
    tiny_checkpoint: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str | None
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint(name), tmp_path / "model"))
    document = json.loads((source / "config.json").read_text())
    inner = document if part is None else document[part]
    inner["dense_act_fn" if part == "text_config" else "hidden_act"] = "sqrtsoftplus"
    (source / "config.json").write_text(json.dumps(document))
    monkeypatch.setattr(build_module, "identify", lambda *_: pytest.fail("weights were fetched and read"))
    monkeypatch.setattr(Family, "graphs", lambda *_: pytest.fail("graphs were traced"))
    with pytest.raises(ExportError, match=r"^\w+ uses operators that the runtime does not accept: \w+"):
        build(source, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("generation_config.json", "[]", "holds list, not an object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id 'x' is not a token id"),
        (
            "generation_config.json",
            '{"eos_token_id": [2, 5000]}',
            "generation_config.json: eos_token_id 5000 is no token",
        ),
        ("tokenizer_config.json", "3", "no tokenizer can be read"),
        ("tokenizer.json", "null", "no tokenizer can be read"),
    ],
)
def test_damaged_files_are_named_before_anything_is_written(
    name: str, text: str, message: str, changed: Callable[..., Path], tmp_path: Path
) -> None:
    folder = changed()
    (folder / name).write_text(text)
    with pytest.raises(VlmexportError, match=message) as caught:
        describe_before_writing(folder)
    assert "\n" not in str(caught.value)


def test_an_end_token_of_the_configuration_is_looked_for_there(changed: Callable[..., Path]) -> None:
    folder = changed(eos_token_id=5000)
    (folder / "generation_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"[^_]config\.json: eos_token_id 5000 is no token"):
        describe_before_writing(folder)


def describe_before_writing(folder: Path) -> None:
    """What `build` checks before it traces."""
    prepare_module.prepare(BuildRequest(model=str(folder), output=Path("x")), write=False)


def test_invalid_manifest_is_refused_before_tracing(
    changed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed()
    (folder / "generation_config.json").write_text('{"eos_token_id": 99999}')
    monkeypatch.setattr(build_module, "export", lambda *_: pytest.fail("a graph was traced"))
    with pytest.raises(UnsupportedModelError, match="eos_token_id 99999 is no token of the model"):
        build(folder, tmp_path / "bundle", draft_layer=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": "x"}, {"size": [1, 2]}, {"resample": []}, {"resample": 9}, {"image_mean": 0.5},
        {"image_mean": [1.0]}, {"image_std": [float("nan")] * 3}, {"do_pad": True}, {"do_rescale": False},
    ],
    ids=str,
)  # fmt: skip
def test_image_settings_that_cannot_be_kept_are_named(settings: dict) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(settings))):
        square_image(settings, (32, 32), "blip", BlipImageProcessorPil)


def test_missing_and_misshapen_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ExportError, match=r"no tensor 'model.layers.1.mlp.up_proj.weight'"):
        build(folder, tmp_path / "bundle", draft_layer=1)
    save_file({**tensors, "model.norm.weight": torch.zeros(5)}, folder / "model.safetensors")
    with pytest.raises(ExportError, match=r"model.norm.weight has shape \(5,\)"):
        build(folder, tmp_path / "bundle", draft_layer=1)


@pytest.mark.parametrize("kind", ["bloom", "llama"])
def test_blip2_with_another_language_model_is_refused(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig, Blip2Config

    folder = tmp_path / kind
    text = AutoConfig.for_model(kind, hidden_size=64, num_attention_heads=2)
    config = Blip2Config(text_config=text, architectures=["Blip2ForConditionalGeneration"])
    config.save_pretrained(folder)
    save_file({"query_tokens": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' is not supported"):
        build(folder, tmp_path / "bundle")


def test_model_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"did you mean.*blip2-flant5"):
        build("blip2-flan", tmp_path / "bundle")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ExportError) as caught:
        build("nobody/nothing", tmp_path / "bundle")
    assert "nobody/nothing" in str(caught.value) and "\n" not in str(caught.value)


# --- failures lose nothing ---


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_existing_output_needs_force(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    build(llama, out, draft_layer=1)
    before = content(out)
    with pytest.raises(OptionError, match="--force"):
        build(llama, out, draft_layer=2)
    assert content(out) == before
    assert build(llama, out, draft_layer=2, force=True).cuts == [0, 2, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]
    keep = tmp_path / "photos"
    keep.mkdir()
    (keep / "cat.jpg").write_bytes(b"1")
    with pytest.raises(OptionError, match="not a bundle"):
        build(llama, keep, draft_layer=1, force=True)
    assert (keep / "cat.jpg").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"manifest.json": '{"name": "My web app"}', "index.html": "mine"}, "is not of a bundle"),
        ({"manifest.json": "{"}, "remove the folder yourself"),
        (
            {
                "manifest.json": '{"format": "vlmexport-bundle", "files": {"a": {}}}',
                "a": "",
                "notes.txt": "mine",
            },
            "notes",
        ),
    ],
)
def test_force_replaces_bundles_only(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(OptionError, match=message):
        output_folder.check_output(tmp_path, force=True)


def test_a_stop_between_the_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = tmp_path / "bundle", Path.rename
    out.mkdir()
    (out / "manifest.json").write_text('{"format": "vlmexport-bundle"}')

    def stop(self: Path, target: Path) -> None:
        rename(self, target)
        if self == out:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(exchange, "exchange", lambda *_: False)  # as where a system cannot do it in one step
        patch.setattr(Path, "rename", stop)
        with pytest.raises(KeyboardInterrupt), output_folder.replaced_folder(out, force=True):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"] and list(content(out)) == ["manifest.json"]
    out.rename(tmp_path / ".bundle.old-999999999")  # killed at that moment
    with pytest.raises(OptionError, match="--force"), output_folder.replaced_folder(out, force=False):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"] and list(content(out)) == ["manifest.json"]


@pytest.mark.parametrize("stage", ["weights", "checks", "checksums"])
def test_ctrl_c_keeps_the_old_bundle(stage: str, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    build(llama, out, draft_layer=1)
    before = content(out)

    def stop(name: str, done: int, total: int) -> None:
        if name == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(llama, out, stop, draft_layer=2, force=True)
    assert content(out) == before and [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_full_disk_is_one_line(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "write_tokenizer", full)
        with pytest.raises(ExportError, match="no space left on the disk"):
            build(llama, tmp_path / "bundle", draft_layer=1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ExportError, match=r"MB needed, 1\.0 kB free"):
        build(llama, tmp_path / "bundle", draft_layer=1)
    assert list(tmp_path.iterdir()) == []


def test_cheap_checks_run_before_reading_and_tracing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that cannot hold the weights, a folder that cannot be written, a tokenizer that is missing."""
    monkeypatch.setattr(prepare_module, "fingerprint", lambda _: pytest.fail("every weight was read"))
    monkeypatch.setattr(build_module, "export", lambda *_: pytest.fail("a graph was traced"))
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"cannot write to .*file; choose another -o"):
        build(llama, tmp_path / "file" / "bundle")
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.os, "access", lambda place, mode: False)
        with pytest.raises(OptionError, match=f"cannot write to {tmp_path}; choose another -o"):
            build(llama, tmp_path / "new" / "bundle")
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        patch.setattr(output_folder.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ExportError, match=r"about [1-9].* MB needed, 1\.0 kB free"):
            build(llama, tmp_path / "new" / "bundle")
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match="has no tokenizer"):
        build(folder, tmp_path / "bundle")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model"]


def _tokenizer(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "tokenizer.json"
        document = json.loads(path.read_text("utf-8"))
        change(document)
        path.write_text(json.dumps(document), "utf-8")

    return damage


def _shifted(document: dict) -> None:
    document["model"]["vocab"] = {word: i + 5000 for i, word in enumerate(document["model"]["vocab"])}


def _nearly_empty(document: dict) -> None:
    document["model"] |= {"vocab": {"a": 0}, "merges": []}


def _unknown_token(document: dict) -> None:
    pieces = [{"SpecialToken": {"id": "<nope>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document["post_processor"] = {
        "type": "TemplateProcessing", "single": pieces, "special_tokens": {},
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    }  # fmt: skip


def _lost(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _words(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bad_words_ids": [[3], [4, 99999]]}))


def _template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")


def _late_loop(folder: Path) -> None:
    """Only a conversation that goes on shows it."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    text = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
        + loop
        + "{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(text)


def _wide(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 10**15}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_tokenizer(_shifted), "gives token 5[0-9]{3}; the model knows"),
        (_tokenizer(_nearly_empty), "is it the model's own"),
        (_tokenizer(_unknown_token), "puts the special token '<nope>' around texts"),
        (_words, "bad_words_ids holds 99999"),
        (_template, r"chat template of .*model/chat_template\.jinja cannot be used: line 1"),
        (_late_loop, r"chat template of .*model/chat_template\.jinja cannot be used: "),
        (_lost, r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (_wide, r"has shape .* not \(1000000000000000, 96\)"),
        (lambda folder: None, "allows 7: shorten it"),
    ],
    ids=["vocabulary", "empty", "panic", "words", "template", "loop", "missing", "shape", "length"],
)
def test_parity_problems_are_found_before_reading(
    damage: Callable[[Path], None],
    message: str,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    damage(folder)
    monkeypatch.setattr(prepare_module, "fingerprint", lambda _: pytest.fail("every weight was read"))
    request = BuildRequest(
        model=str(folder), output=tmp_path / "bundle", max_length=8 if message.startswith("allows") else 64
    )
    with pytest.raises(VlmexportError, match=message) as caught:
        build_bundle(request)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # libraries are silent, too
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_pipes_and_endless_files_are_not_read(name: str, llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ExportError, match=f"{name} is not a regular file"):
        build(folder, tmp_path / "bundle")
    (folder / name).unlink()
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ExportError, match="no model's description is so long"):
        build(folder, tmp_path / "bundle")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "blip2-t5"])
def test_the_estimate_is_near_the_bundle(name: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    request = BuildRequest(model=str(tiny_checkpoint(name)), output=tmp_path / "bundle", draft_layer=1)
    found = estimated_bytes(prepare_module.prepare(request)) - SPARE_BYTES
    weights = dry_run(request).weight_bytes
    assert 0.98 * found <= weights <= 1.02 * found, (found, weights)


def test_a_failed_build_removes_the_folders_that_it_made(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise ExportError("stopped")

    monkeypatch.setattr(build_module, "export", stop)
    with pytest.raises(ExportError, match="stopped"):
        build(llama, tmp_path / "some" / "where" / "bundle", draft_layer=1)
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_written_once(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity is in it, and every file was read for its checksum once."""
    written, described = [], []
    write, describe = build_module.write_manifest, build_module.describe_files

    def counted_write(folder: Path, manifest: object) -> int:
        written.append(sorted(p.name for p in folder.iterdir()))
        return write(folder, manifest)  # type: ignore[arg-type]

    def counted_describe(*arguments: object) -> object:
        described.append(arguments)
        return describe(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "write_manifest", counted_write)
    monkeypatch.setattr(build_module, "describe_files", counted_describe)
    report = build_bundle(BuildRequest(model=str(llama), output=tmp_path / "bundle", draft_layer=1))
    assert len(written) == len(described) == 1 and "manifest.json" not in written[0]
    manifest = Bundle.open(tmp_path / "bundle", check="sha256").manifest
    assert manifest.parity == report.parity and {"generation", "head"} <= {p["graph"] for p in report.parity}
    assert report.bytes == sum(p.stat().st_size for p in (tmp_path / "bundle").iterdir())


HOLDER = (
    "import sys, time; from pathlib import Path; from vlmexport.exporter.output.leftovers import new_folder;"
    "folder, lock = new_folder(Path(sys.argv[1])); (folder / 'weights.bin').touch(); print(folder.name, flush=True);"
    "time.sleep(600)"
)


def test_leftovers_are_recognized_by_their_lock(tmp_path: Path) -> None:
    """The id of a dead process in a living one's folder, that of a living process in a dead one's: as in containers
    that share a volume."""
    out = tmp_path / "bundle"
    command = [sys.executable, "-c", HOLDER, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        alive = tmp_path / holder.stdout.readline().strip()
        renamed = alive.rename(tmp_path / ".bundle.building-99999999")
        dead = tmp_path / f".bundle.building-{os.getpid()}"
        dead.mkdir()
        (dead / "weights.bin").write_bytes(b"0")
        with output_folder.replaced_folder(out, force=False) as work:
            assert not dead.exists() and (renamed / "weights.bin").exists()
            remove_leftovers(out)  # another build of the same output, meanwhile
            assert work.exists()
            (work / "manifest.json").write_text('{"format": "vlmexport-bundle"}')
        holder.kill()
    with output_folder.replaced_folder(out, force=True):
        assert not renamed.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_bundle_being_replaced_is_not_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = tmp_path / "bundle", Path.rename
    out.mkdir()
    (out / "manifest.json").write_text('{"format": "vlmexport-bundle"}')
    seen = []

    def meanwhile(self: Path, target: Path) -> Path:
        found = rename(self, target)
        if self == out:  # between the two renames
            remove_leftovers(out)
            seen.extend(sorted(p.name.rpartition("-")[0] for p in tmp_path.iterdir() if "-" in p.name))
        return found

    monkeypatch.setattr(exchange, "exchange", lambda *_: False)  # as where a system cannot do it in one step
    monkeypatch.setattr(Path, "rename", meanwhile)
    with output_folder.replaced_folder(out, force=True) as work:
        (work / "new").touch()
    assert seen == [".bundle.building", ".bundle.old"]
    assert list(content(out)) == ["new"] and [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_second_build_of_one_output_is_refused_at_once(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    with output_folder.replaced_folder(out, force=False) as work:
        with pytest.raises(OptionError, match=f"another process writes to {out}: wait for it"):
            output_folder.replaced_folder(out, force=True).__enter__()
        with output_folder.replaced_folder(tmp_path / "other", force=False) as other:
            (other / "weights.bin").touch()
        (work / "weights.bin").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "other"]
    assert list(content(out)) == ["weights.bin"]


def test_a_manifest_cannot_change_while_folders_are_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored meanwhile is stored in the new folder."""
    out = handmade_bundle.write_bundle(tmp_path / "bundle")
    entry, threads = {"machine": "late", "threads": 1}, []

    def finish(work: Path) -> None:
        threads.append(threading.Thread(target=store_costs, args=(out, [entry])))
        threads[0].start()
        time.sleep(0.1)
        assert threads[0].is_alive() and not Bundle.open(out).manifest.costs

    with output_folder.replaced_folder(out, True, finish) as work:
        shutil.copytree(out, work, dirs_exist_ok=True)
        (work / "manifest.json").write_bytes((out / "manifest.json").read_bytes())
    threads[0].join()
    assert Bundle.open(out).manifest.costs == [entry]
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_missing_tokenizer_is_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would make an empty one, or ask for tiktoken where sentencepiece is needed."""
    folder = shutil.copytree(llama, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ExportError, match=r"has no tokenizer \(tokenizer\.json"):
        _ = open_checkpoint(folder).tokenizer
    (folder / "spiece.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ExportError, match=r"spiece\.model.*pip install sentencepiece"):
        _ = open_checkpoint(folder).tokenizer
