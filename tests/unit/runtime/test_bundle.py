"""`Bundle.open` accepts a good bundle and refuses every kind of damage with one clear line."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.bundle import folder as bundle_module
from vlmexport.runtime.bundle import manifest_file
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import BundleError, OptionError

from tests.support import handmade_bundle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return handmade_bundle.write_bundle(tmp_path / "bundle")


def test_valid_bundle_opens(folder: Path) -> None:
    opened = Bundle.open(folder, check="sha256")
    table = opened.tensor("embedding_table")
    info = opened.manifest.tensors["embedding_table"]
    expected = np.frombuffer((folder / "weights.bin").read_bytes()[: info.bytes], np.float32)
    np.testing.assert_array_equal(table, expected.reshape(info.shape))
    assert opened.tokenizer.decode(opened.tokenizer.encode("the red cup")) == "the red cup"


def test_tensor_with_offset_has_the_right_bytes(folder: Path) -> None:
    info = handmade_bundle.read(folder)["tensors"]["encoder.relative_bias"]
    raw = (folder / "weights.bin").read_bytes()[info["offset"] : info["offset"] + info["bytes"]]
    view = Bundle.open(folder).tensor("encoder.relative_bias")
    assert view.shape == (32, 2)
    assert view.tobytes() == raw


def test_tensors_are_read_only_views_of_one_map(folder: Path) -> None:
    opened = Bundle.open(folder)
    table = opened.tensor("embedding_table")
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 1.0
    assert np.shares_memory(table, opened.tensor("embedding_table"))


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = handmade_bundle.read(folder)
        change(data)
        handmade_bundle.write_manifest(folder, data)

    return damage


def _set(path: str, value: Any) -> Callable[[Path], None]:
    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for name in parents:
            data = data[name]
        data[last] = value

    return _edit(change)


def _flip_byte(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return damage


def _append(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"x") and None


def _link_outside(folder: Path) -> None:
    outside = folder.parent / "outside.onnx"
    outside.write_bytes((folder / "head.onnx").read_bytes())
    (folder / "head.onnx").unlink()
    (folder / "head.onnx").symlink_to(outside)


def _link_to_a_folder(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder / "plans").symlink_to(folder.parent / "elsewhere")


def _listed_below_a_link(folder: Path) -> None:
    (folder / "plans").mkdir()
    (folder / "plans" / "real").mkdir()
    (folder / "plans" / "real" / "x.plan").write_bytes(b"1")
    data = handmade_bundle.read(folder)
    data["files"] = handmade_bundle.list_files(folder)
    handmade_bundle.write_manifest(folder, data)
    Bundle.open(folder)
    (folder / "plans" / "linked").symlink_to("real")


def _pipe_instead_of_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def _folder_instead_of_file(folder: Path) -> None:
    (folder / "head.onnx").unlink()
    (folder / "head.onnx").mkdir()


def _text(text: str | bytes) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / "manifest.json").write_bytes(data) and None


_FILE = {"bytes": 3, "sha256": "0" * 64}

DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing graph": (lambda folder: (folder / "head.onnx").unlink(), r"head\.onnx: listed .* missing"),
    "missing weights": (lambda folder: (folder / "weights.bin").unlink(), r"weights\.bin: .*missing"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "not a bundle"),
    "longer file": (_append("weights.bin"), r"weights\.bin: \d+ bytes, the manifest says \d+"),
    "changed file": (_flip_byte("segment.0.onnx"), r"segment\.0\.onnx: SHA-256 .* was changed"),
    "changed tokenizer": (_flip_byte("tokenizer.json"), r"tokenizer\.json: SHA-256"),
    "extra file": (lambda folder: (folder / "x.so").write_bytes(b"1") and None, r"x\.so: not listed"),
    "extra hidden file": (lambda folder: (folder / ".x").write_bytes(b"1") and None, r"\.x: not listed"),
    "extra file below": (
        lambda folder: (
            (folder / "plans").mkdir() or ((folder / "plans" / "x.plan").write_bytes(b"1") and None)
        ),
        r"plans/x\.plan: not listed",
    ),
    "link out of the bundle": (
        _link_outside,
        r"head\.onnx: leads out of the bundle .*`hf download REPO --local-dir FOLDER`",
    ),
    "folder instead of a file": (_folder_instead_of_file, "not a regular file"),
    "manifest is a pipe": (_pipe_instead_of_manifest, r"manifest\.json: is not a regular file"),
    "link to a folder": (_link_to_a_folder, r"plans: is a link to a folder; copy the files in"),
    "listed below a link to a folder": (
        _listed_below_a_link,
        r"leads out of the bundle|is a link to a folder",
    ),
    "newer schema": (_set("schema_version", 3), r"'schema_version': 3 is newer .* upgrade"),
    "older schema": (
        _set("schema_version", 1),
        r"'schema_version': 1 is of an older .* build the bundle again",
    ),
    "other format": (_set("format", "zip"), "'format': 'zip'"),
    "parent path": (_set("files/..%2f", _FILE), "files"),
    "parent folder": (_edit(lambda d: d["files"].update({"../x": _FILE})), r"'\.\./x'"),
    "absolute path": (_edit(lambda d: d["files"].update({"/etc/passwd": _FILE})), "'/etc/passwd'"),
    "graph file elsewhere": (_set("graphs/head/file", "../head.onnx"), r"graphs\.head\.file"),
    "weights elsewhere": (_set("weights/file", "/dev/zero"), r"weights\.file"),
    "tokenizer elsewhere": (_set("text/tokenizer", "../t.json"), r"text\.tokenizer"),
    "tensor beyond the weights": (_set("tensors/embedding_table/offset", 10**9), r"embedding_table\.offset"),
    "negative offset": (_set("tensors/embedding_table/offset", -8), r"embedding_table\.offset.*-8"),
    "tensor shape and bytes differ": (_set("tensors/embedding_table/bytes", 4), r"embedding_table\.bytes"),
    "absurd length": (_set("limits/max_length", 10**12), r"limits\.max_length"),
    "absurd layer count": (_set("decoder/num_layers", 10**9), r"decoder\.num_layers"),
    "zero heads": (_set("decoder/num_heads", 0), r"decoder\.num_heads"),
    "number as text": (_set("limits/max_width", "8"), r"limits\.max_width"),
    "huge image": (_set("image/height", 10**7), r"image\.height"),
    "weights size lies": (
        _edit(lambda d: d["weights"].update(bytes=d["weights"]["bytes"] + 64)),
        r"weights\.bytes",
    ),
    "not JSON": (_text("{"), "not a readable manifest"),
    "empty manifest": (_text(""), "not a readable manifest"),
    "not an object": (_text("[]"), "list"),
    "not UTF-8": (_text(b"\xff\xfe{}"), "not a readable manifest"),
    "NaN": (_text('{"format": NaN}'), "NaN"),
    "name twice": (_text('{"format": 1, "format": 2}'), "'format' appears twice"),
    "endless number": (_text('{"schema_version": ' + "9" * 5000 + "}"), "not a sensible number"),
    "deep nesting": (_text("[" * 100_000), "not a readable manifest"),
    "a pickle": (_text(pickle.dumps({"format": "vlmexport-bundle"})), "not a readable manifest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_bundle_is_refused_in_one_line(folder: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(BundleError, match=message) as caught:
        Bundle.open(folder)
    assert "\n" not in str(caught.value)


def test_large_files_are_checked_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "SMALL", 100)
    _flip_byte("weights.bin")(folder)
    Bundle.open(folder)  # the size is right, and the file is too big to be read at every start
    with pytest.raises(BundleError, match=r"weights\.bin: SHA-256"):
        Bundle.open(folder, check="sha256")


def test_progress_counts_every_byte(folder: Path) -> None:
    opened, seen = Bundle.open(folder), dict.fromkeys(handmade_bundle.read(folder)["files"], 0)
    count = opened.check_sums(progress=lambda name, size: seen.update({name: seen[name] + size}))
    assert count == len(seen)
    assert seen == {name: info.bytes for name, info in opened.manifest.files.items()}


def test_oversized_manifest_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_file, "MANIFEST_LIMIT", 100)
    with pytest.raises(BundleError, match="a manifest has at most 100"):
        Bundle.open(folder)


@pytest.mark.parametrize("what", ["nowhere", "file"])
def test_path_to_a_file_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="does not exist" if what == "nowhere" else "not a bundle folder"):
        Bundle.open(tmp_path / what)


@pytest.mark.parametrize("path", [None, 3, b"bundle", "x" * 5000])
def test_invalid_path_is_refused(path: Any) -> None:
    with pytest.raises(BundleError, match="the path of the bundle is empty"):
        Bundle.open("")
    with pytest.raises(BundleError, match="is not a path") as caught:
        Bundle.open(path)
    assert len(str(caught.value)) < 300


def test_bundle_of_another_model_differs_in_weights(folder: Path) -> None:
    bundle = Bundle.open(folder)
    own = bundle.manifest.model
    bundle.check_model(own.source, own.fingerprint)
    wrong = rf"is a bundle of .* \({own.fingerprint[:19]}\), not of other \(sha256:b\); give one of the same model"
    with pytest.raises(OptionError, match=wrong):
        bundle.check_model("other", "sha256:b")


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    opened = Bundle.open(folder)
    with pytest.raises(BundleError, match="no tensor 'x'; there are embedding_table"):
        opened.tensor("x")


def test_path_not_encodable_in_locale_is_refused(tmp_path: Path) -> None:
    """Python then stands bytes in for letters, which no library takes: the tokenizer's said to build the bundle again."""
    folder = handmade_bundle.write_bundle(tmp_path / "größe")
    code = (
        "import sys; from vlmexport.runtime.bundle.folder import Bundle; from vlmexport.runtime.common.errors import BundleError\n"
        "try: Bundle.open(sys.argv[1]).tokenizer; print('opened')\n"
        "except BundleError as error: print(ascii(str(error)))"
    )
    said = {}
    for name, setting in {"ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "utf-8": {"LC_ALL": "C.UTF-8"}}.items():  # fmt: skip
        environment = {**os.environ, **setting}
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        said[name] = done.stdout.strip()
    assert said["utf-8"] == "opened"
    assert "set PYTHONUTF8=1" in said["ascii"] and "build" not in said["ascii"]
