"""The manifest: what is accepted, kept, and refused with the field and the value."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime.bundle.manifest import SCHEMA_VERSION, Manifest
from vlmexport.runtime.common.errors import BundleError, OptionError

from tests.support import handmade_bundle

BUNDLE_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "bundle.md"


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return handmade_bundle.read(handmade_bundle.write_bundle(tmp_path_factory.mktemp("manifest") / "bundle"))


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A deep copy with one field replaced; the path is separated by slashes."""
    out = copy.deepcopy(data)
    *parents, last = path.split("/")
    place: Any = out
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = value
    return out


def test_round_trip_keeps_everything(valid: dict[str, Any]) -> None:
    data = changed(changed(valid, "later", {"new": 1}), "decoder/later", [1, 2])
    written = Manifest.from_dict(data).to_dict()
    assert written["later"] == {"new": 1}
    assert written["decoder"]["later"] == [1, 2]
    assert Manifest.from_dict(json.loads(json.dumps(written))).to_dict() == written
    again = Manifest.from_dict(valid).to_dict()
    assert written == again | {"decoder": again["decoder"] | {"later": [1, 2]}, "later": {"new": 1}}


def test_documented_example_is_the_format() -> None:
    example = json.loads(re.search(r"```json\n(.*?)```", BUNDLE_PAGE.read_text(), re.S).group(1))
    # The page shows one of the graphs; everything before the look-up of the others must be accepted.
    with pytest.raises(BundleError, match=r"graphs\.segment\.1' is missing"):
        Manifest.from_dict(example)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("format", "zip", "format"),
        ("schema_version", SCHEMA_VERSION + 1, "upgrade"),
        ("schema_version", "1", "schema_version"),
        ("limits/max_length", -1, "limits.max_length"),
        ("limits/max_length", 10**15, "limits.max_length"),
        ("limits/max_length", True, "limits.max_length"),
        ("limits/max_width", 0, "limits.max_width"),
        ("decoder/hidden_size", 1 << 40, "decoder.hidden_size"),
        ("decoder/num_layers", -2, "decoder.num_layers"),
        ("decoder/num_kv_heads", 3, "decoder.num_kv_heads"),
        ("decoder/mask_heads", 7, "decoder.mask_heads"),
        ("decoder/cuts", [0, 2, 1], "decoder.cuts"),
        ("decoder/cuts", [0, 1], "decoder.cuts"),
        ("decoder/position", "alibi", "decoder.position"),
        ("decoder/relative_bias", None, "decoder.relative_bias"),
        ("decoder/layer_types", ["full_attention"] * 3, "decoder.layer_types"),
        ("decoder/layer_types", ["chunked_attention"] * 2, r"decoder.layer_types\[0\]"),
        ("decoder/layer_types", ["sliding_attention"] * 2, "decoder.sliding_window': None"),
        ("decoder/sliding_window", 8, "decoder.sliding_window"),
        ("decoder/max_block", 16, "decoder.max_block.*float mask or cross-attention"),
        ("encoder", None, "graphs.encoder"),
        ("image/std", [0.2, 0.0, 0.2], r"image.std\[1\]"),
        ("image/rescale_factor", float("nan"), "image.rescale_factor"),
        ("graphs/head/role", "tail", "graphs.head.role"),
        ("graphs/head/role", "embed", "graphs.head.role"),
        ("graphs/head/file", "../head.onnx", "graphs.head.file"),
        ("graphs/head/file", "/etc/passwd", "graphs.head.file"),
        ("graphs/head/file", "plans/head.onnx", "graphs.head.file"),
        ("graphs/head/file", "other.onnx", "graphs.head.file"),
        ("graphs/segment.1/layers", [0, 2], "graphs.segment.1.layers"),
        ("graphs/head/inputs/0/shape", ["batch", -1], r"graphs.head.inputs\[0\].shape\[1\]"),
        ("graphs/head/inputs/0/dtype", "complex64", r"graphs.head.inputs\[0\].dtype"),
        ("weights/file", "..", "weights.file"),
        ("text/tokenizer", "a/b.json", "text.tokenizer"),
        ("text/eos_token_ids", [10**6], r"text.eos_token_ids\[0\]"),
        ("tensors/embedding_table/offset", 1 << 33, "tensors.embedding_table.offset"),
        ("tensors/embedding_table/shape", [1, 2], "tensors.embedding_table"),
        ("tensors/decoder.relative_bias/shape", [2, 32], "tensors.decoder.relative_bias.shape"),
        ("drafts/0/layer", 2, r"drafts\[0\].layer"),
        ("drafts/0/graphs/imitation", "imitation.9", r"drafts\[0\].graphs.imitation"),
        ("drafts/1/name", "imitation@1", "name"),
        ("policy/draft", "medusa@1", "policy.draft"),
        ("policy/confidence_threshold", 1.5, "policy.confidence_threshold"),
        ("files", {"../x": {"bytes": 1, "sha256": "0"}}, "files"),
        # numbers that fit their own range but nothing else in the manifest
        ("image/mean", [10**400, 0, 0], r"image.mean\[0\]"),
        ("image/rescale_factor", 0, "image.rescale_factor"),
        ("image/height", 17, r"graphs.vision.inputs.*\[17, 24\]"),
        ("text/image_rows", 5, r"graphs.vision.outputs"),
        ("text/image_rows", None, "limits.max_image_rows"),
        ("text/vocab_size", 5, "text.vocab_size"),
        ("text/decoder_start_token_id", 10**6, "text.decoder_start_token_id"),
        ("decoder/head_dim", 5, "graphs.cross_kv.outputs|graphs.commit.inputs"),
        ("decoder/mask_dtype", "bool", "attn_mask is float32"),
        ("cache_dtype", "float16", "key_cache"),
        ("decoder/position", "rotary", "positions"),
        ("decoder/relative_bias/max_distance", 16, "max_distance': 16 is not above half"),
        ("tensors/embedding_table/offset", 1, "offset': 1 is not a multiple of 64"),
        ("drafts/0/graphs/imitation", "segment.0", r"drafts\[0\].graphs.imitation"),
        ("graphs/head/outputs", [], "graphs.head.outputs.*logits"),
        ("graphs/head/outputs/0/shape", ["rows"], r"graphs.head.outputs\[0\]"),
        ("graphs/head/inputs/0/dtype", "int64", "graphs.head.inputs"),
        ("graphs/encoder/inputs/0/name", "other", "graphs.encoder.inputs.*encoder_rows, other"),
    ],
)
def test_invalid_field_is_named(valid: dict[str, Any], path: str, value: Any, named: str) -> None:
    with pytest.raises(BundleError, match=named):
        Manifest.from_dict(changed(valid, path, value))


def test_names_missing_fields_and_wrong_types(valid: dict[str, Any]) -> None:
    without = copy.deepcopy(valid)
    del without["decoder"]["head_dim"]
    with pytest.raises(BundleError, match=r"decoder\.head_dim' is missing"):
        Manifest.from_dict(without)
    for junk in (None, [], "manifest", 3):
        with pytest.raises(BundleError):
            Manifest.from_dict(junk)


def test_choosing_a_draft(valid: dict[str, Any]) -> None:
    data = copy.deepcopy(valid)
    draft = copy.deepcopy(next(d for d in data["drafts"] if d["kind"] == "early-exit"))
    data["drafts"] = [draft | {"name": "first"}, draft | {"name": "second"}]
    data["policy"] |= {"draft": "second", "speculative": True}
    manifest = Manifest.from_dict(data)

    def chosen(name: str | None) -> str | None:
        found = manifest.choose_draft(name)
        return None if found is None else found.name

    assert chosen("first") == "first" and chosen("none") is None
    assert chosen(None) == "second" and chosen("early-exit") == "second", "the default is preferred"
    manifest.policy.draft = None
    assert chosen("early-exit") == "first" and chosen(None) is None
    manifest.policy.draft, manifest.policy.speculative = "second", False
    assert chosen(None) is None and chosen("early-exit") == "second"
    with pytest.raises(
        OptionError, match=r"the bundle has no 'medusa'; it has first, second; none decodes plainly"
    ):
        manifest.choose_draft("medusa")
