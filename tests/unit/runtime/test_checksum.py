"""The manifest's own checksum, and what `check` compares: flipped bits are found, and a robot pays once."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime import Session
from vlmexport.runtime.bundle import file_checks
from vlmexport.runtime.bundle import folder as bundle_module
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest_changes import store_costs
from vlmexport.runtime.bundle.seal import checksum, manifest_text, sealed
from vlmexport.runtime.bundle.verified_cache import record_path
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import BundleError, OptionError

from tests.support import handmade_bundle

ENTRY = {"machine": "board", "threads": 1, "segments": {}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLMEXPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundle_module, "SMALL", 100)  # no file of the bundle is small
    return handmade_bundle.write_bundle(tmp_path / "bundle")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def write_as_it_is(folder: Path, data: dict[str, Any], **layout: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps(data, **layout), "utf-8")


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("image", "mean", [0.48, 0.45, 0.41]),
        ("text", "eos_token_ids", [2]),
        ("text", "default_prompt", "describe the scenf"),
        ("policy", "draft_length", 4),
        ("producer", "created", "2027"),
        ("limits", "later", 1),
    ],
)
def test_checksum_covers_every_manifest_value(folder: Path, part: str, field: str, value: Any) -> None:
    data = handmade_bundle.read(folder)
    data[part][field] = value
    write_as_it_is(folder, data)
    with pytest.raises(BundleError, match=r"checksum of its fields .* a value was changed; copy") as caught:
        Bundle.open(folder)
    assert "\n" not in str(caught.value) and f"checksum {folder}" in str(caught.value)


def test_flipped_manifest_bits_are_detected_or_harmless(folder: Path) -> None:
    path, rng = folder / "manifest.json", random.Random(0)
    whole = path.read_bytes()
    values = {name: value for name, value in json.loads(whole).items() if name != "sha256"}
    refused = 0
    for _ in range(300):
        flip(path, rng.randrange(8 * len(whole)))
        try:
            read = handmade_bundle.read(folder) if Bundle.open(folder) else {}
        except BundleError:
            refused += 1
        else:  # white space, an exponent in capitals, or the name of the checksum's field
            assert {name: read[name] for name in values} == values
        path.write_bytes(whole)
    assert refused > 250


def test_json_layout_does_not_change_the_checksum(folder: Path) -> None:
    data = handmade_bundle.read(folder)
    turned = dict(reversed(data.items()))
    turned["image"] = dict(reversed(data["image"].items()))
    for layout in ({"indent": 7}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"sort_keys": True}):
        write_as_it_is(folder, turned, **layout)
        assert Bundle.open(folder, check="sha256").manifest.sha256 == data["sha256"]
    assert checksum({"a": 1.0, "b": [2.5, {"c": -0.0}]}) == checksum({"b": [2.5, {"c": 0}], "a": 1})
    assert checksum({"a": 1}) != checksum({"a": 2}) != checksum({"b": 2}) != checksum({"b": "2"})
    assert list(sealed({"sha256": "old", "a": 1})) == ["a", "sha256"]


def test_a_manifest_without_checksum_opens_but_is_not_verified(folder: Path) -> None:
    data = handmade_bundle.read(folder)
    del data["sha256"]
    write_as_it_is(folder, data)
    assert Bundle.open(folder).manifest.sha256 is None
    for check in ("sha256", "once"):
        with pytest.raises(BundleError, match=r"no checksum of its own .* build the bundle again, or trust"):
            Bundle.open(folder, check=check)


def test_suggested_command_seals_an_edited_manifest(folder: Path) -> None:
    data = handmade_bundle.read(folder)
    data["text"]["default_prompt"] = "what is on the table"
    write_as_it_is(folder, data)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    command = str(caught.value).partition("run `python ")[2].rstrip("`").split()
    subprocess.run([sys.executable, *command], check=True)
    opened = Bundle.open(folder, check="sha256")
    assert opened.manifest.text.default_prompt == "what is on the table"
    (folder / "manifest.json").write_text("{")
    failed = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "not a readable" in failed.stderr


def test_storing_costs_keeps_checksum_and_detects_damage(folder: Path) -> None:
    before = handmade_bundle.read(folder)["sha256"]
    store_costs(folder, [ENTRY])
    assert handmade_bundle.read(folder)["sha256"] != before
    assert Bundle.open(folder, check="sha256").manifest.costs == [ENTRY]
    data = handmade_bundle.read(folder)
    data["image"]["mean"][0] = 0.0
    write_as_it_is(folder, data)
    with pytest.raises(BundleError, match="a value was changed"):
        store_costs(folder, [{**ENTRY, "threads": 2}])


def test_a_new_calibration_replaces_what_was_stored_of_its_drafts(folder: Path) -> None:
    """A chain that was looked at on other requests must not tell of a later calibration; devices are merged beside it."""

    def seen(draft: str, depth: int, date: str) -> dict[str, object]:
        counted = {"shapes": [[depth, depth, 2]], "accepted": [2], "discarded": 0, "requests": 1, "data": "d"}
        return {"draft": draft, "nodes": depth, "depth": depth, "date": date, **counted}

    def stored() -> list[tuple[str, int, str]]:
        return [(e["draft"], e["depth"], e["date"]) for e in Bundle.open(folder).manifest.acceptance]

    store_costs(folder, [ENTRY], [seen("a", 4, "old"), seen("a", 2, "old"), seen("b", 4, "old")])
    store_costs(folder, [ENTRY], [seen("a", 4, "merged"), seen("a", 3, "merged")])
    assert stored() == [("a", 4, "merged"), ("a", 2, "old"), ("b", 4, "old"), ("a", 3, "merged")]
    store_costs(folder, [ENTRY], [seen("a", 4, "new")], anew=True)
    assert stored() == [("b", 4, "old"), ("a", 4, "new")]


def test_a_built_bundle_has_a_checksum(tiny_bundle: Callable, tmp_path: Path) -> None:
    path = tiny_bundle("llama").path
    document = json.loads((path / "manifest.json").read_text("utf-8"))
    assert list(document)[-1] == "sha256"
    assert (path / "manifest.json").read_text("utf-8") == manifest_text(document)
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    flip(copy / "weights.bin", 8 * ((copy / "weights.bin").stat().st_size // 2))
    with pytest.raises(BundleError, match=r"weights\.bin: SHA-256"):
        Session.load(copy, check="sha256")
    assert main(["run", str(copy), "--prompt", "a cup", "--check"]) == 2
    assert main(["run", str(path), "--prompt", "a cup", "--check", "--max-new-tokens", "2"]) == 0


def test_every_flipped_bit_of_the_weights_is_found_on_request(folder: Path) -> None:
    size, rng = (folder / "weights.bin").stat().st_size, random.Random(1)
    for _ in range(40):
        bit = rng.randrange(8 * size)
        flip(folder / "weights.bin", bit)
        Bundle.open(folder)  # the size is right, and the file is too big to be read at every start
        with pytest.raises(BundleError, match=r"weights\.bin: SHA-256"):
            Bundle.open(folder, check="sha256")
        flip(folder / "weights.bin", bit)
    Bundle.open(folder, check="sha256")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compared: list[str] = []
    compare = file_checks.compare_checksum

    def count(path: Path, *rest: Any) -> Any:
        compared.append(path.name)
        return compare(path, *rest)

    for module in (file_checks, bundle_module):  # where it is looked up
        monkeypatch.setattr(module, "compare_checksum", count)
    return compared


def test_check_once_compares_only_changed_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = counted(monkeypatch)
    names = sorted(handmade_bundle.read(folder)["files"])
    Bundle.open(folder, check="once")
    assert sorted(compared) == names
    compared.clear()
    Bundle.open(folder, check="once")
    store_costs(folder, [ENTRY])  # what is not a listed file does not count
    Bundle.open(folder, check="once")
    assert compared == []
    flip(folder / "weights.bin", 80)
    os.utime(folder / "weights.bin", ns=(1, 1))  # the clock of a file system may be too coarse for a test
    for _ in range(2):  # what failed is not remembered
        with pytest.raises(BundleError, match=r"weights\.bin: SHA-256"):
            Bundle.open(folder, check="once")
    assert compared == ["weights.bin"] * 2
    flip(folder / "weights.bin", 80)
    Bundle.open(folder, check="once")
    shutil.copy2(folder / "head.onnx", folder / ".new")  # the same bytes and time in another inode
    (folder / ".new").replace(folder / "head.onnx")
    compared.clear()
    Bundle.open(folder, check="once")
    assert compared == ["head.onnx"]


def test_changed_manifest_checksum_is_checked_again(folder: Path) -> None:
    Bundle.open(folder, check="once")
    data = handmade_bundle.read(folder)
    data["files"]["weights.bin"]["sha256"] = "0" * 64
    handmade_bundle.write_manifest(folder, data)
    with pytest.raises(BundleError, match=r"weights\.bin: SHA-256"):
        Bundle.open(folder, check="once")


@pytest.mark.parametrize(
    "record", ["", "[]", '{"files": {"weights.bin": [1]}}', "[" * 100_000, '{"files": 3}']
)
def test_damaged_check_record_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    path = record_path(folder)
    path.parent.mkdir(parents=True)
    path.write_text(record)
    compared = counted(monkeypatch)
    Bundle.open(folder, check="once")
    assert len(compared) == len(handmade_bundle.read(folder)["files"])
    assert list(json.loads(path.read_text())["files"]) == compared


def test_only_check_once_writes_and_only_into_the_cache(folder: Path, tmp_path: Path) -> None:
    Bundle.open(folder)
    Bundle.open(folder, check="sha256")
    assert not (tmp_path / "cache").exists()
    Bundle.open(folder, check="once")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [record_path(folder)]


def test_location_of_the_check_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"VLMEXPORT_CACHE": "named", "XDG_CACHE_HOME": "xdg/vlmexport", "HOME": "home/.cache/vlmexport"}
    for variable in places:
        monkeypatch.setenv(variable, str(tmp_path / places[variable].partition("/")[0]))
    for variable, place in places.items():
        assert record_path(tmp_path).parent == tmp_path / place / "verified"
        monkeypatch.delenv(variable)


def test_unwritable_cache_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OptionError, match=r"'once' cannot remember in .*cache.*; set VLMEXPORT_CACHE"):
        Bundle.open(folder, check="once")


@pytest.mark.parametrize("check", ["sha512", None, True])
def test_unknown_check_mode_is_refused_early(folder: Path, check: Any) -> None:
    with pytest.raises(OptionError, match=r"check: .* is not one of size, sha256, once"):
        Session.load(folder, check=check)
    opened = Bundle.open(folder)
    with pytest.raises(OptionError, match="is not one of"):
        Session.load(opened, check=check)
