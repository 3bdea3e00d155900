"""LLaVA-NeXT's tiles: what is refused, what a bundle says of them, and pictures of several sizes in one batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.common.sample_inputs import odd_picture
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.prepare import prepare
from vlmexport.exporter.tensorrt.profiles import Sizes, profiles_for
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import OptionError, UnsupportedModelError

from tests.support import tiny_models

NAME = "llava-next"


def changed(folder: Path, file: str, part: str | None, values: dict[str, Any]) -> Path:
    """The folder with other values in a JSON file, or in a part of it."""
    path = folder / file
    document = json.loads(path.read_text())
    (document if part is None else document[part]).update(values)
    path.write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (
            "text_config",
            {"model_type": "mistral"},
            "LlavaNextForConditionalGeneration with the language model",
        ),
        ("vision_config", {"model_type": "siglip_vision_model"}, "vision tower 'siglip_vision_model'"),
        ("vision_config", {"image_size": [32, 32]}, r"vision_config.image_size=.*32.*is not one number"),
        (None, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy='full'"),
        (None, {"vision_feature_layer": [-2, -5]}, r"vision_feature_layer=\[-2, -5\] is not one of"),
        (None, {"image_grid_pinpoints": [[32, 48]]}, r"\[32, 48\] in image_grid_pinpoints is not"),
        (None, {"image_grid_pinpoints": [[32, 64, 32]]}, "is not a height and a width in tiles of 32"),
        (None, {"image_grid_pinpoints": [[0, 32]]}, "is not a height and a width in tiles of 32"),
        (None, {"image_grid_pinpoints": []}, "image_grid_pinpoints is empty"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, part: str | None, values: dict[str, Any], message: str
) -> None:
    folder = changed(tiny_models.checkpoint(NAME, tmp_path), "config.json", part, values)
    with pytest.raises(UnsupportedModelError, match=message):
        family_for(open_checkpoint(folder))


def test_whole_states_of_clip_have_no_layout_in_transformers_either(tmp_path: Path) -> None:
    """Why the strategy "full" is refused. Where this fails, it can be supported."""
    model, _ = tiny_models.llava_next(strategy="full")
    with pytest.raises(RuntimeError), torch.no_grad():
        model.get_image_features(torch.randn(3, 3, 32, 32), torch.tensor([[32, 64]]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop_size": {"height": 48, "width": 48}}, "differs from the vision tower's 32 x 32"),
        ({"size": {"shortest_edge": 48}}, "differs from the vision tower's 32 x 32"),
        ({"size": {"height": 32, "width": 64}}, "differs from the vision tower's 32 x 32"),
        ({"image_grid_pinpoints": [[32, 64], [64, 32]]}, "image_grid_pinpoints differ from the model's"),
        ({"image_grid_pinpoints": [[32, 40]]}, r"image processor: \[32, 40\] in image_grid_pinpoints"),
        ({"image_grid_pinpoints": 7}, "image processor: 7 in image_grid_pinpoints"),
        ({"do_resize": False}, "do_resize=false"),
        ({"do_normalize": False}, "do_normalize=false"),
        ({"resample": 9}, "resample=9"),
    ],
)
def test_a_processor_of_other_tiles_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = tiny_models.checkpoint(NAME, tmp_path)
    changed(folder, "processor_config.json", "image_processor", values)
    with pytest.raises(UnsupportedModelError, match=message):
        family_for(open_checkpoint(folder)).image()


def test_the_manifest_knows_the_tiles_and_the_most_rows(tiny_bundle: Callable[..., Any]) -> None:
    folder, checkpoint = tiny_bundle(NAME)
    manifest = Bundle.open(folder).manifest
    assert manifest.image is not None
    image, pinpoints = manifest.image, [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
    assert (image.processor, image.height, image.width) == ("llava-next", 32, 32)
    assert image.extra["image_grid_pinpoints"] == pinpoints and image.extra["patch_size"] == 16
    # 4 rows of the whole picture, 4 × 4 of a 64 × 64 canvas, 4 that end a line; 96 × 32 has 4 + 6 × 2 + 6.
    assert manifest.text.image_rows is None and manifest.limits.max_image_rows == 24
    graph = manifest.graphs["vision"]
    shapes = {value.name: value.shape for value in (*graph.inputs, *graph.outputs)}
    assert shapes == {"pixel_values": ["tiles", 3, 32, 32], "row_index": ["rows"], "image_rows": ["rows", 96]}
    family = family_for(open_checkpoint(checkpoint))
    assert family.checkpoint.stored("model.image_newline") in _weights(folder / "vision.onnx")


def _weights(path: Path) -> set[str]:
    model = onnx.load(str(path), load_external_data=False)
    return {tensor.name for tensor in model.graph.initializer if tensor.external_data}


def test_pictures_of_several_sizes_in_one_batch(tiny_checkpoint: Callable[..., Path]) -> None:
    """Other numbers of tiles and rows in each request; `generate-data` and training make such batches."""
    family = family_for(open_checkpoint(tiny_checkpoint(NAME)))
    model = load_reference(family.checkpoint, streamed=False)
    pictures = [odd_picture(0), [odd_picture(1), odd_picture(3)]]
    prompts = [family.reference_prompt(each, "the red cup") for each in pictures]
    tiles = [len(prompt.vision["pixel_values"]) for prompt in prompts if prompt.vision]
    assert tiles == [5, 4 + 5], "of pictures in canvases of 64 × 64, 96 × 32 and 64 × 64"
    assert family.reference_prompt(None, "the red cup").vision is None
    texts = [[40, 41, 42], [43]]
    with torch.no_grad():
        together = model(**collate(family, prompts, texts)).logits
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            alone = model(**collate(family, [prompt], [text])).logits[0]
            torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-4, rtol=1e-4)


def test_tiles_of_the_models_processor_become_runs(tiny_checkpoint: Callable[..., Path]) -> None:
    family = family_for(open_checkpoint(tiny_checkpoint(NAME)))
    assert family.vision is not None
    prompt = family.reference_prompt([odd_picture(2), odd_picture(1)], "the red cup")
    assert prompt.vision is not None
    runs = family.vision.runs({name: value.numpy() for name, value in prompt.vision.items()})
    assert sum(len(run["row_index"]) for run in runs) == prompt.input_ids.count(family.image_token_id)
    joined = np.concatenate([run["pixel_values"] for run in runs])
    np.testing.assert_array_equal(joined, prompt.vision["pixel_values"].numpy())


def test_a_folder_of_an_older_release_leaves_sizes_to_the_configuration(tmp_path: Path) -> None:
    folder = tiny_models.checkpoint(NAME, tmp_path)
    want = family_for(open_checkpoint(folder)).reference_prompt(odd_picture(0), "the red cup")
    path = folder / "processor_config.json"
    document = json.loads(path.read_text())
    for name in ("patch_size", "num_additional_image_tokens", "vision_feature_select_strategy"):
        del document[name]
    path.write_text(json.dumps(document))
    found = family_for(open_checkpoint(folder)).reference_prompt(odd_picture(0), "the red cup")
    assert found.input_ids == want.input_ids


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_narrow_bundles_pass_parity(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, precision: str
) -> None:
    """The row that ends a line is narrow like the tiles' rows beside it."""
    request = BuildRequest(
        model=str(tiny_checkpoint(NAME)), output=tmp_path / "b", draft_layer=1, precision=precision
    )
    build_bundle(request)
    parity = {entry["graph"]: entry for entry in Bundle.open(tmp_path / "b").manifest.parity}
    assert parity["vision"]["relative_difference"] <= parity["vision"]["limit"]


@pytest.mark.parametrize(("name", "rows"), [(NAME, 24), ("llava", 4)])
def test_a_length_without_room_for_a_picture_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, name: str, rows: int
) -> None:
    request = BuildRequest(
        model=str(tiny_checkpoint(name)), output=tmp_path / "b", draft_layer=1, max_length=rows + 1
    )
    with pytest.raises(OptionError, match=rf"which has up to {rows} rows; give at least {rows + 2}, and"):
        build_bundle(request)
    assert not (tmp_path / "b").exists()


def test_profiles_of_tiles(tiny_bundle: Callable[..., Any]) -> None:
    manifest = Bundle.open(tiny_bundle(NAME)[0]).manifest
    (profile,) = profiles_for("vision", Sizes.of_manifest(manifest))
    assert profile.shapes(["tiles", 3, 32, 32], "pixel_values")[2] == (5, 3, 32, 32)
    assert profile.shapes(["rows"], "row_index") == ((1,), (24,), (24,))


@pytest.mark.parametrize(
    ("name", "options", "given", "length"),
    [
        ("llama", {}, {}, 512),
        ("blip2-opt", {}, {}, 512),
        ("llava", {"image_side": 80, "patch_size": 8, "max_position_embeddings": 2048}, {}, 640),  # 100 rows
        ("llava", {"image_side": 80, "patch_size": 8, "max_position_embeddings": 600}, {}, 600),
        ("llava", {"image_side": 80, "patch_size": 8}, {"max_length": 200}, 200),
        ("qwen2.5-vl", {}, {}, 512),
        ("qwen2.5-vl", {}, {"max_pixels": 20 * 784}, 512),
    ],
)
def test_a_bundle_has_room_for_a_picture_unasked(
    tiny_checkpoint: Callable, tmp_path: Path, name: str, options: dict, given: dict, length: int
) -> None:
    model = str(tiny_checkpoint(name, **options))
    prepared = prepare(BuildRequest(model=model, output=tmp_path / "b", draft_layer=1, **given))
    assert prepared.request.length == prepared.manifest.limits.max_length == length
