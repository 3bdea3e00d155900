"""`--link-weights`: the checkpoint's own files in the bundle, read where they lie."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.dry_run import dry_run
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.manifest_changes import reseal
from vlmexport.runtime.bundle.manifest_file import read_manifest
from vlmexport.runtime.common.errors import BundleError, ExportError, OptionError
from vlmexport.runtime.measure.inspection import facts

from tests.support import tiny_models
from tests.unit.exporter.test_precision import answers

QUICK = {("blip2-t5", "float16"), ("qwen2.5-vl", "float32"), ("llama-tied", "bfloat16")}
CASES = [
    pytest.param(name, precision, marks=() if (name, precision) in QUICK else pytest.mark.slow)
    for name in tiny_models.BUILDERS
    for precision in ("float32", "float16", "bfloat16")
]


def built(model: Path, output: Path, **options: Any) -> Bundle:
    build_bundle(BuildRequest(model=str(model), output=output, draft_layer=1, **options))
    return Bundle.open(output, check="sha256")


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_linked_bundle_computes_what_another_does(tmp_path: Path, name: str, precision: str) -> None:
    """Of checkpoints in two shards and more. Parity is checked while it is built."""
    model = tmp_path / "model"
    tiny_models.checkpoint(name, model, dtype=getattr(torch, precision), max_shard_size="150KB")
    bundle = built(model, tmp_path / "linked", precision=precision, link_weights=True)
    shards = {file.name: file for file in model.glob("*.safetensors")}
    linked = bundle.manifest.weights.linked
    assert len(linked) > 1 and set(linked) <= set(shards)
    for file, count in linked.items():
        assert (bundle.path / file).samefile(shards[file]) and count == shards[file].stat().st_size
    copied = built(model, tmp_path / "copied", precision=precision, parity=False)
    own, whole = bundle.manifest.weights.bytes, copied.manifest.weights.bytes
    assert own < 0.2 * whole, "what is stored anew: the draft, and tensors in another layout"
    assert bundle.manifest.tensors["embedding_table"].file in linked
    assert (bundle.tensor("embedding_table") == copied.tensor("embedding_table")).all()
    expected = answers(copied.path, speculative=False)
    assert len({token for tokens in expected for token in tokens}) > 6
    assert answers(bundle.path, speculative=False) == expected
    assert answers(bundle.path, draft="early-exit@1", draft_length=4) == expected


def test_a_dry_run_says_what_is_linked(tmp_path: Path) -> None:
    model = tiny_models.checkpoint("llama", tmp_path / "model", dtype=torch.float16)
    options: dict[str, Any] = {"precision": "float16", "link_weights": True, "draft_layer": 1}
    request = BuildRequest(model=str(model), output=tmp_path / "bundle", **options)
    found, report = dry_run(request), build_bundle(request)
    shown = facts(Bundle.open(request.output))
    size = (model / "model.safetensors").stat().st_size
    assert found.linked_bytes == report.linked_bytes == size
    assert shown["weights"]["linked"] == {"model.safetensors": size}
    assert found.weight_bytes == report.weight_bytes == shown["weights"]["bytes"]
    assert report.bytes == sum(file.stat().st_size for file in request.output.iterdir())
    assert shown["bytes"] >= found.bundle_bytes > size


def test_linked_bundle_outlives_its_checkpoint(tmp_path: Path) -> None:
    model = tiny_models.checkpoint("llama", tmp_path / "model")
    bundle = built(model, tmp_path / "bundle", link_weights=True, parity=False)
    expected = answers(bundle.path)
    shutil.rmtree(model)
    copy = Path(shutil.copytree(bundle.path, tmp_path / "copy"))
    shutil.rmtree(bundle.path)
    assert answers(copy) == expected


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """The hub's client keeps `snapshots/REVISION/model.safetensors` as a link to `blobs/HASH`."""
    model = tiny_models.checkpoint("llama", tmp_path / "model")
    blob = tmp_path / "0f3a"
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)
    bundle = built(model, tmp_path / "bundle", link_weights=True, parity=False)
    assert (bundle.path / "model.safetensors").samefile(blob)
    assert not (bundle.path / "model.safetensors").is_symlink()


def test_what_cannot_be_linked_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.checkpoint("llama", tmp_path / "model", dtype=torch.float16)
    out = tmp_path / "bundle"
    with pytest.raises(OptionError, match=r"stores float16 and the bundle float32; add --precision float16"):
        built(model, out, link_weights=True)
    for number, message in ((errno.EXDEV, "different file systems"), (errno.EPERM, "cannot be linked to")):
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(number, os.strerror(number))))
        with pytest.raises(OptionError, match=message):
            built(model, out, link_weights=True, precision="float16")
    tensors = load_file(model / "model.safetensors")
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(OptionError, match="are not safetensors files"):
        built(model, out, link_weights=True, precision="float16")
    assert not out.exists()


def test_other_file_systems_are_told_before_anything_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.checkpoint("llama", tmp_path / "model")
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        found = real(path, **options)
        if path.suffix != ".safetensors":
            return found
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:]))

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(OptionError, match="different file systems; choose an -o beside the model"):
        dry_run(BuildRequest(model=str(model), output=tmp_path / "bundle", link_weights=True))


def test_a_linked_number_that_is_not_finite_stops_the_build(tmp_path: Path) -> None:
    model = tiny_models.checkpoint("llama", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][1, 2] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=rf"tensor {name} holds 1 number\(s\) that are NaN"):
        built(model, tmp_path / "bundle", link_weights=True, parity=False)


def test_changed_linked_weights_are_detected(tmp_path: Path) -> None:
    model = tiny_models.checkpoint("llama", tmp_path / "model")
    bundle = built(model, tmp_path / "bundle", link_weights=True, parity=False)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1" * 8)
    with pytest.raises(BundleError, match=r"model\.safetensors: SHA-256"):
        Bundle.open(bundle.path, check="sha256")


@pytest.mark.parametrize("kind", ["length", "outside", "unknown", "unaligned"])
def test_inconsistent_link_entries_are_refused(tmp_path: Path, kind: str) -> None:

    model = tiny_models.checkpoint("llama", tmp_path / "model")
    bundle = built(model, tmp_path / "bundle", link_weights=True, parity=False)
    document = read_manifest(bundle.path / "manifest.json")
    table, linked = document["tensors"]["embedding_table"], document["weights"]["linked"]
    expected = {
        "length": "weights.linked.model.safetensors.*is not the size",
        "outside": "tensors.embedding_table.offset.*inside weights",
        "unknown": "tensors.embedding_table.file.*one of 'weights.linked'",
        "unaligned": "tensors.embedding_table.offset.*a multiple of 4",
    }[kind]
    if kind == "length":
        linked["model.safetensors"] += 1
    elif kind == "unknown":
        table["file"] = "tokenizer.json"
    else:
        table["offset"] = 2 if kind == "unaligned" else linked["model.safetensors"] - 8
    with pytest.raises(BundleError, match=expected):
        Manifest.from_dict(document)
        (bundle.path / "manifest.json").write_text(json.dumps(document))
        reseal(bundle.path)
        Bundle.open(bundle.path)
