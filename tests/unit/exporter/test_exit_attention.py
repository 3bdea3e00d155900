"""Attention of imitation networks: the network, its folder, its graph, and what parity says of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.drafts.imitation.imitation import ImitationConfig, ImitationDraft, ImitationNetwork
from vlmexport.exporter.parity import check_parity
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.tensorrt.profiles import Sizes, profiles_for
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import BundleError, ExportError, OptionError
from vlmexport.runtime.graphs.registry import reads_prompts
from vlmexport.runtime.measure.inspection import cache_bytes, kv_bytes_per_token

from tests.support.tiny_bundles import seeded, stir, untrained_draft


def network(heads: int = 4, width: int = 32, **options: object) -> ImitationNetwork:
    """One with random weights."""
    with seeded(3) as generator:
        made = ImitationNetwork(width, attention_heads=heads, **options)  # type: ignore[arg-type]
        stir(made, generator, 1.5 / width**0.5)
    return made.eval()


@torch.no_grad()
def test_attention_depends_on_earlier_rows_and_distance() -> None:
    net, rows = network(), torch.randn(2, 9, 32, generator=torch.manual_seed(1))
    whole = net(rows)
    later = rows.clone()
    later[:, 5:] += 1
    assert torch.allclose(net(later)[:, :5], whole[:, :5], atol=1e-6), "nothing of what comes later"
    assert (net(later)[:, 5:] - whole[:, 5:]).abs().max() > 0.1
    earlier = rows.clone()
    earlier[:, 2] *= -1
    assert (net(earlier)[:, 8] - whole[:, 8]).abs().max() > 1e-3
    swapped = rows[:, [1, 0, *range(2, 9)]]
    assert (net(swapped)[:, 8] - whole[:, 8]).abs().max() > 1e-3, "an order that is not seen is no text"
    first, past = net.behind(rows[:, :4])
    second, past = net.behind(rows[:, 4:], past)
    assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-5)
    assert past[0].shape == past[1].shape == (2, 4, 9, 8)
    assert torch.equal(net(rows[0]), net(rows[:1])[0])


def test_network_without_attention_is_unchanged(tmp_path: Path) -> None:
    """Weights, folder and fingerprint: drafts of earlier versions load, and are the drafts that bundles name."""
    torch.manual_seed(0)
    plain = ImitationNetwork(32)
    torch.manual_seed(0)
    attending = ImitationNetwork(32, attention_heads=4)
    assert sorted(plain.state_dict()) == [
        "linear.0.bias", "linear.0.weight", "linear.1.bias", "linear.1.weight", "norm.bias", "norm.weight",
    ]  # fmt: skip
    for name, value in plain.state_dict().items():
        assert torch.equal(value, attending.state_dict()[name])
    rows = torch.randn(3, 5, 32)
    assert torch.equal(plain(rows), rows) and torch.equal(attending(rows), rows), "untrained: an early exit"
    target = {"name": "x", "fingerprint": "sha256:1"}
    for name, made in (("plain", plain), ("attending", attending)):
        draft = ImitationDraft(network=made, layer=2, target=target)
        draft.save(tmp_path / name)
        loaded = ImitationDraft.load(tmp_path / name)
        assert loaded.network.config == made.config and loaded.fingerprint == draft.fingerprint
    document = json.loads((tmp_path / "plain" / "draft.json").read_text())
    before = {
        "hidden_size": 32, "num_linear": 2, "activation": "gelu", "norm": "layer_norm", "residual": True
    }  # fmt: skip
    assert document["network"] == before
    digest = hashlib.sha256(json.dumps(before, sort_keys=True).encode())
    for name, value in sorted(plain.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}".encode() + value.numpy().tobytes())
    assert ImitationDraft.load(tmp_path / "plain").fingerprint == f"sha256:{digest.hexdigest()}"
    document = json.loads((tmp_path / "attending" / "draft.json").read_text())
    assert document["network"] == before | {"attention_heads": 4}
    entry = ImitationDraft(network=plain, layer=2, target=target).entry("float32")
    assert "cache" not in entry
    entry = ImitationDraft(network=attending, layer=2, target=target).entry("float16")
    assert entry["cache"] == {"num_layers": 1, "num_kv_heads": 4, "head_dim": 8, "dtype": "float16"}


def test_heads_that_do_not_fit_are_named() -> None:
    for heads, message in (
        (3, "3 attention heads do not divide the width 32 into pairs"),
        (32, "32 attention heads do not divide the width 32 into pairs"),
        (-1, "0 or more attention heads, not -1"),
        (True, "0 or more attention heads, not True"),
    ):
        with pytest.raises(OptionError, match=message):
            ImitationConfig(32, attention_heads=heads)
    assert ImitationConfig(32, norm="none", attention_heads=4).attention_norm == "rms_norm"
    assert "attention_heads" in asdict(ImitationConfig(32))


@pytest.fixture(scope="module")
def built(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """(bundle, checkpoint, draft): attention behind layer 2, none behind layer 1."""
    folder, model = tmp_path_factory.mktemp("attention"), tiny_checkpoint("llama", num_hidden_layers=3)
    plain = untrained_draft(model, 1, folder / "plain")
    draft = untrained_draft(model, 2, folder / "draft", heads=4)
    request = BuildRequest(
        model=str(model), output=folder / "bundle", drafts=[str(draft), str(plain)], parity=False
    )
    build_bundle(request)
    return folder / "bundle", model, draft


def test_manifest_describes_the_draft_cache(built: tuple[Path, Path, Path]) -> None:
    manifest = Bundle.open(built[0]).manifest
    assert list(manifest.attending) == ["imitation@2"] and manifest.attending["imitation@2"].head_dim == 24
    names = {name: [value.name for value in graph.inputs] for name, graph in manifest.graphs.items()}
    assert names["imitation.1"] == ["hidden"]
    assert sorted(names["imitation.2"]) == [
        "attn_mask", "hidden", "key_cache.0", "positions", "value_cache.0", "write_indices",
    ]  # fmt: skip
    own = 2 * 4 * 24 * 4
    assert kv_bytes_per_token(manifest) == cache_bytes(manifest, range(3)) + own
    prompts = {name: reads_prompts(manifest.graphs[name]) for name in ("imitation.1", "imitation.2")}
    assert prompts == {"imitation.1": False, "imitation.2": True}
    sizes = Sizes(max_length=80, max_batch=4, max_width=8)
    for name, wanted in (
        ("imitation.1", ["token", "verify"]),
        ("imitation.2", ["prefill", "token", "verify"]),
    ):
        assert [p.name for p in profiles_for("imitation", sizes, prompts[name])] == wanted


def test_inconsistent_draft_cache_is_refused(built: tuple[Path, Path, Path]) -> None:
    from vlmexport.runtime.bundle.manifest import Manifest

    for change, message in (
        ({"num_layers": 2}, "cache of 'imitation@2' has 2 layers"),
        ({"num_kv_heads": 2}, "key_cache.0"),
        (None, r"graphs.imitation.2.inputs' does not fit"),
    ):
        document = json.loads((built[0] / "manifest.json").read_text())
        draft = next(each for each in document["drafts"] if each["name"] == "imitation@2")
        draft["cache"] = None if change is None else draft["cache"] | change
        with pytest.raises(BundleError, match=message):
            Manifest.from_dict(document)


@pytest.mark.parametrize("memory", [1 << 40, 0], ids=["whole", "layer-by-layer"])
def test_parity_compares_rows_keys_and_values(built: tuple[Path, Path, Path], memory: int) -> None:
    path, checkpoint, folder = built
    draft = ImitationDraft.load(folder)
    found = check_parity(
        path, open_checkpoint(str(checkpoint)), drafts=[draft], memory_limit=memory, generation=False
    )
    (row,) = [each for each in found if each["graph"] == "imitation.2"]
    assert row["relative_difference"] <= row["limit"] and row["values"] > 0


@pytest.mark.parametrize("spoil", ["mask", "slots", "positions", "weight"])
def test_parity_finds_a_wrong_graph(built: tuple[Path, Path, Path], tmp_path: Path, spoil: str) -> None:
    """One that ignores an input, or has another weight than the draft."""
    source, checkpoint, folder = built
    draft = ImitationDraft.load(folder)
    path = Path(shutil.copytree(source, tmp_path / "bundle"))
    model = onnx.load(str(path / "imitation.2.onnx"), load_external_data=False)
    (angles,) = (node for node in model.graph.node if node.op_type == "Mul")
    for node in model.graph.node:
        if spoil == "mask" and node.op_type == "Attention":
            del node.input[3:]
        if spoil == "slots" and node.op_type == "TensorScatter":
            del node.input[2:]
    for tensor in model.graph.initializer:
        if spoil == "positions" and tensor.name == angles.input[1]:
            zeros = np.zeros_like(onnx.numpy_helper.to_array(tensor))
            tensor.CopyFrom(onnx.numpy_helper.from_array(zeros, tensor.name))
    if spoil == "weight":
        with torch.no_grad():
            draft.network.attention.self_attn.k_proj.weight.mul_(1.0003)  # type: ignore[union-attr]
    (path / "imitation.2.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=r"parity failed: imitation\.2"):
        check_parity(path, open_checkpoint(str(checkpoint)), drafts=[draft], generation=False)
