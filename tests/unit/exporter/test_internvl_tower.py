"""InternVL at export: what is refused by name, `--max-pixels`, narrow and integer weights, and a planted error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.common.sample_inputs import odd_picture
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.families.vision import internvit
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.prepare import prepare
from vlmexport.exporter.tensorrt.profiles import Sizes, profiles_for
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import ExportError, OptionError, UnsupportedModelError

from tests.support import kept_traces, tiny_models

NAME, SIDE = "internvl", 32
Checkpoints = Callable[..., Path]


def changed(source: Path, folder: Path, file: str, part: str | None, values: dict[str, Any]) -> Path:
    """A copy of the folder with other values in a JSON file, or in a part of it; None takes a field out."""
    shutil.copytree(source, folder)
    document = json.loads((folder / file).read_text())
    found = document if part is None else document[part]
    found.update(values)
    for name in [name for name, value in values.items() if value is None]:
        del found[name]
    (folder / file).write_text(json.dumps(document))
    return folder


CONFIG, PICTURES, TOKENIZER = "config.json", "preprocessor_config.json", "tokenizer_config.json"
MARKS = {"start_image_token": None, "extra_special_tokens": {}}


@pytest.mark.parametrize(
    ("file", "part", "values", "message"),
    [
        (CONFIG, "text_config", {"model_type": "gpt_oss"}, "with the language model 'gpt_oss' .* 'llama', 'qwen2', 'qwen3'"),
        (CONFIG, "text_config", {"model_type": "qwen3_moe"}, "with the language model 'qwen3_moe' is not supported"),
        (CONFIG, "vision_config", {"model_type": "clip_vision_model"}, "vision tower 'clip_vision_model'"),
        (CONFIG, "vision_config", {"image_size": [32, 64]}, r"image_size \[32, 64\] in patches of \[8, 8\]"),
        (CONFIG, "vision_config", {"patch_size": [8, 16]}, r"in patches of \[8, 16\] is not supported, only squares"),
        (CONFIG, "vision_config", {"patch_size": 10}, "downsample_ratio=0.5 is not supported for 3 x 3 patches"),
        (CONFIG, None, {"downsample_ratio": 0.4}, "downsample_ratio=0.4 is not supported for 4 x 4 patches"),
        (CONFIG, None, {"downsample_ratio": 1.0}, "says image_seq_length=4, but a tile becomes 16 embeddings"),
        (CONFIG, None, {"vision_feature_layer": 0}, r"vision_feature_layer=0 is not supported, only one of 1\.\.3"),
        (CONFIG, None, {"vision_feature_layer": [-1, -2]}, r"vision_feature_layer=\[-1, -2\] is not supported"),
        (CONFIG, None, {"vision_feature_layer": -5}, "vision_feature_layer=-5 is not supported"),
        (CONFIG, None, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy='full'"),
        (CONFIG, None, {"image_token_id": 3}, "image_token_id=3 is not the tokenizer's context_image_token"),
        (PICTURES, None, {"size": {"height": 64, "width": 64}}, "differs from the vision tower's 32 x 32"),
        (PICTURES, None, {"size": {"shortest_edge": 32}}, "differs from the vision tower's 32 x 32"),
        (PICTURES, None, {"min_patches": 0}, r"min_patches=0 is not in 1\.\.64"),
        (PICTURES, None, {"max_patches": 65}, r"max_patches=65 is not in 1\.\.64"),
        (PICTURES, None, {"min_patches": 9, "max_patches": 8}, "min_patches is above max_patches"),
        (PICTURES, None, {"do_normalize": False}, "do_normalize=false is not supported"),
        (PICTURES, None, {"do_center_crop": True}, "do_center_crop=true is not supported"),
        ("processor_config.json", None, {"image_seq_length": 5}, "processor_config.json says image_seq_length=5"),
        ("processor_config.json", None, {"image_seq_length": None}, "processor_config.json says image_seq_length=256"),
        (TOKENIZER, None, MARKS, "its tokenizer has no start_image_token; take tokenizer_config.json"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    file: str,
    part: str | None,
    values: dict[str, Any],
    message: str,
) -> None:
    folder = changed(tiny_checkpoint(NAME), tmp_path / "changed", file, part, values)
    with pytest.raises(UnsupportedModelError, match=message):
        prepare(BuildRequest(model=str(folder), output=tmp_path / "b"), write=False)


def test_the_processors_own_switch_of_tiles_is_not_asked(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Published folders say `crop_to_patches: false`; transformers' `InternVLProcessor` asks for tiles all the same."""
    folder = changed(tiny_checkpoint(NAME), tmp_path / "c", PICTURES, None, {"crop_to_patches": False})
    prompt = family_for(open_checkpoint(folder)).reference_prompt(odd_picture(0), "the red cup")
    assert prompt.vision is not None and len(prompt.vision["pixel_values"]) == 13


def test_the_manifest_knows_the_tiles_and_the_most_rows(tiny_bundle: Callable[..., Any]) -> None:
    manifest = Bundle.open(tiny_bundle(NAME)[0]).manifest
    assert manifest.image is not None
    image = manifest.image
    assert (image.processor, image.height, image.width) == ("got-ocr2", SIDE, SIDE)
    assert image.extra == {
        "min_patches": 1, "max_patches": 12, "image_seq_length": 4, "start_image_token": "<img>",
        "end_image_token": "</img>",
    }  # fmt: skip
    assert manifest.text.image_rows is None and manifest.limits.max_image_rows == 13 * 4
    graph = manifest.graphs["vision"]
    shapes = {value.name: value.shape for value in (*graph.inputs, *graph.outputs)}
    assert shapes == {"pixel_values": ["tiles", 3, SIDE, SIDE], "image_rows": ["tiles", 4, 96]}
    (profile,) = profiles_for("vision", Sizes.of_manifest(manifest))
    least, _, most = profile.shapes(["tiles", 3, SIDE, SIDE], "pixel_values")
    assert (least, most) == ((1, 3, SIDE, SIDE), (13, 3, SIDE, SIDE))


@pytest.mark.parametrize(("tiles", "most"), [(5, 5), (1, 1), (100, 12)])
def test_max_pixels_lowers_the_number_of_tiles(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tiles: int, most: int
) -> None:
    request = BuildRequest(
        model=str(tiny_checkpoint(NAME)), output=tmp_path / "b", draft_layer=1, max_pixels=tiles * SIDE**2 + 7
    )
    report = build_bundle(request)  # the row `preparation` compares tiles with transformers'
    assert any(row["graph"] == "preparation" for row in report.parity)
    manifest = Bundle.open(tmp_path / "b").manifest
    assert manifest.image is not None and manifest.image.extra["max_patches"] == most
    assert manifest.limits.max_image_rows == 4 * (most + (most > 1))


def test_max_pixels_below_a_tile_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    request = BuildRequest(model=str(tiny_checkpoint(NAME)), output=tmp_path / "b", max_pixels=SIDE**2 - 1)
    with pytest.raises(UnsupportedModelError, match=r"--max-pixels 1023 is too small .* at least 1024"):
        prepare(request, write=False)


def test_a_bundle_has_room_for_the_largest_picture(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = str(tiny_checkpoint(NAME, image_side=64, patch_size=8))
    assert prepare(BuildRequest(model=model, output=tmp_path / "b"), write=False).request.length == 768
    with pytest.raises(OptionError, match="which has up to 208 rows; give at least 210"):
        prepare(BuildRequest(model=model, output=tmp_path / "b", max_length=209), write=False)
    one = BuildRequest(model=model, output=tmp_path / "b", max_length=80, max_pixels=64 * 64)
    assert prepare(one, write=False).manifest.limits.max_image_rows == 16


@pytest.mark.parametrize(
    ("stored", "precision"),
    [("float32", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
def test_narrow_checkpoints_and_bundles_pass_parity(tmp_path: Path, stored: str, precision: str) -> None:
    """transformers makes a tower in the type that its own part of config.json names; it casts pictures then."""
    saved = tiny_models.checkpoint(NAME, tmp_path / "saved", dtype=getattr(torch, stored), language="qwen3")
    own = {"torch_dtype": stored} if stored != "float32" else {}
    model = changed(saved, tmp_path / "model", CONFIG, "vision_config", own)
    request = BuildRequest(model=str(model), output=tmp_path / "b", draft_layer=1, precision=precision)
    vision = next(row for row in build_bundle(request).parity if row["graph"] == "vision")
    assert vision["relative_difference"] <= vision["limit"]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integer_weights_answer_alike_with_and_without_a_draft(
    tiny_checkpoint: Checkpoints, tmp_path: Path, weights: str
) -> None:
    model = str(tiny_checkpoint(NAME, language="qwen3"))
    build_bundle(BuildRequest(model=model, output=tmp_path / "b", draft_layer=1, weights=weights))
    asked: dict[str, Any] = {
        "images": [odd_picture(0), odd_picture(1)],
        "prompt": "a red cup",
        "max_new_tokens": 8,
    }
    with Session.load(tmp_path / "b") as session:
        plain = session.generate(**asked, draft="none")
        assert session.generate(**asked, draft="early-exit", draft_length=3).tokens == plain.tokens != []


def test_pictures_of_several_sizes_in_one_batch(tiny_checkpoint: Checkpoints) -> None:
    """Other numbers of tiles in each request; `generate-data` and training make such batches."""
    family = family_for(open_checkpoint(tiny_checkpoint(NAME)))
    model = load_reference(family.checkpoint, streamed=False)
    prompts = [
        family.reference_prompt(each, "the red cup")
        for each in (odd_picture(2), [odd_picture(1), odd_picture(3)])
    ]
    assert len({len(prompt.vision["pixel_values"]) for prompt in prompts if prompt.vision}) == 2
    texts = [[40, 41, 42], [43]]
    with torch.no_grad():
        together = model(**collate(family, prompts, texts)).logits
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            alone = model(**collate(family, [prompt], [text])).logits[0]
            torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-4, rtol=1e-4)


class _Untransposed:
    """InternVL's pixel shuffle without its last transposition."""

    @staticmethod
    def pixel_shuffle(_: Any, states: torch.Tensor, ratio: float) -> torch.Tensor:
        return internvit_model.pixel_shuffle(_, states, ratio).transpose(1, 2)


internvit_model = internvit.InternVLModel


def test_pixel_shuffle_without_its_transposition_fails(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internvit, "InternVLModel", _Untransposed)
    request = BuildRequest(model=str(tiny_checkpoint(NAME)), output=tmp_path / "b", draft_layer=1)
    with kept_traces.anew(), pytest.raises(ExportError, match="parity failed: vision differs from torch"):
        build_bundle(request)
