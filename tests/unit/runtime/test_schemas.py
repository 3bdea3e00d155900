"""The published JSON schemas are valid, accept what the code writes, and refuse what it must not write."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import vlmexport.runtime
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.measure.inspection import facts

from tests.support import handmade_bundle

SCHEMAS = Path(vlmexport.runtime.__file__).parent / "schemas"


def schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))


def errors(name: str, value: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema(name))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.stem)
def test_every_schema_is_a_valid_schema(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["$id"].endswith(f":{path.stem}")


@pytest.mark.parametrize("family", ["blip2", "llama"])
def test_manifests_and_inspect_output_are_valid(tmp_path: Path, family: str) -> None:
    folder = handmade_bundle.write_bundle(tmp_path / "bundle", family)
    assert errors("manifest-2", handmade_bundle.read(folder)) == []
    bundle = Bundle.open(folder)
    assert errors("manifest-2", bundle.manifest.to_dict()) == []
    assert errors("inspect-1", facts(bundle) | {"checked": {"sizes": 9, "sha256": None}}) == []


WRONG = {
    "limits/max_length": 0, "limits/max_width": "8", "format": "zip", "schema_version": 3, "decoder/head_dim": -1,
    "decoder/position": "alibi", "graphs/head/role": 7, "graphs/head/file": "../head.onnx", "drafts": {},
    "weights/bytes": -1, "text/eos_token_ids": None, "text/special_tokens": {"eos_token": 1}, "image/mean": [1.0], "verify_width": 0, "model": None,
    "plans": [{"lowering": "rows"}],
}  # fmt: skip


@pytest.mark.parametrize("path", WRONG)
def test_schema_and_reader_agree(tmp_path: Path, path: str) -> None:
    data = copy.deepcopy(handmade_bundle.read(handmade_bundle.write_bundle(tmp_path / "bundle")))
    *parents, last = path.split("/")
    part = data
    for name in parents:
        part = part[name]
    part[last] = WRONG[path]
    assert errors("manifest-2", data)
    with pytest.raises(BundleError):
        Manifest.from_dict(data)


@pytest.mark.parametrize(
    "name", ["format", "model", "limits", "text", "decoder", "graphs", "weights", "files"]
)
def test_required_fields(tmp_path: Path, name: str) -> None:
    data = handmade_bundle.read(handmade_bundle.write_bundle(tmp_path / "bundle"))
    del data[name]
    assert errors("manifest-2", data)
    with pytest.raises(BundleError):
        Manifest.from_dict(data)


def test_unknown_fields_of_later_versions_are_accepted(tmp_path: Path) -> None:
    data = handmade_bundle.read(handmade_bundle.write_bundle(tmp_path / "bundle"))
    data["later"] = {"x": 1}
    data["decoder"]["later"] = 1
    assert errors("manifest-2", data) == []
    assert Manifest.from_dict(data).to_dict()["later"] == {"x": 1}
