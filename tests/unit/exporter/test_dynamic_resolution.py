"""Qwen2.5-VL's pictures and videos at export: `--max-pixels`, and what its processors and towers cannot ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vlmexport.exporter.families.vision.patch_settings import sampled_video
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.prepare import prepare
from vlmexport.runtime.common.errors import OptionError, UnsupportedModelError

from tests.support import tiny_models

UNIT = 28 * 28


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "checkpoint"
    tiny_models.save(*tiny_models.BUILDERS["qwen2.5-vl"](), folder)
    return folder


def changed(checkpoint: Path, folder: Path, file: str, part: str | None, **values: Any) -> Path:
    """A copy whose `file` (its object `part`) has other values."""
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).symlink_to(path)
    found = json.loads((checkpoint / file).read_text())
    (found if part is None else found[part]).update(values)
    (folder / file).unlink()
    (folder / file).write_text(json.dumps(found))
    return folder


def test_max_pixels_makes_pictures_and_frames_smaller(checkpoint: Path, tmp_path: Path) -> None:
    request = BuildRequest(model=str(checkpoint), output=tmp_path / "bundle", max_pixels=6 * UNIT + 5)
    report = build_bundle(
        request
    )  # parity: pictures up to their bound as the model's own processor makes them
    assert any(row["graph"] == "preparation" for row in report.parity)
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["limits"]["max_image_rows"] == 6
    assert manifest["image"]["max_pixels"] == manifest["image"]["video"]["max_pixels"] == 6 * UNIT + 5
    assert manifest["image"]["video"]["min_pixels"] == 4 * UNIT


def test_the_processors_own_bound_stays_where_it_is_lower(checkpoint: Path, tmp_path: Path) -> None:
    request = BuildRequest(model=str(checkpoint), output=tmp_path / "bundle", max_pixels=10**9)
    assert prepare(request, write=False).manifest.limits.max_image_rows == 24


def test_max_pixels_is_refused_where_it_means_nothing(
    checkpoint: Path, tiny_bundle: Callable, tmp_path: Path
) -> None:
    for name in ("llava", "llama"):
        request = BuildRequest(model=str(tiny_bundle(name)[1]), output=tmp_path / "b", max_pixels=10_000)
        with pytest.raises(OptionError, match="--max-pixels 10000: this model reads no pictures of any size"):
            prepare(request, write=False)
    for pixels, error in ((0, OptionError), (UNIT - 1, UnsupportedModelError)):
        with pytest.raises(error):
            prepare(
                BuildRequest(model=str(checkpoint), output=tmp_path / "b", max_pixels=pixels), write=False
            )


@pytest.mark.parametrize(
    ("file", "part", "values", "message"),
    [
        ("preprocessor_config.json", None, {"patch_size": 16}, "patch_size=16 differs from the vision tower's 14"),
        ("preprocessor_config.json", None, {"do_resize": False}, "do_resize=false is not supported"),
        ("preprocessor_config.json", None, {"size": {"shortest_edge": 9, "longest_edge": 8}}, "no sizes of pictures"),
        ("video_preprocessor_config.json", None, {"image_mean": [0, 0, 0]}, "video processor: image_mean"),
        ("video_preprocessor_config.json", None, {"do_normalize": False}, "video processor: do_normalize=false"),
        ("video_preprocessor_config.json", None, {"resample": 2}, "video processor: resample=2 differs"),
        ("config.json", "vision_config", {"out_hidden_size": 64}, "out_hidden_size=64 is not the language model's 96"),
        ("config.json", "text_config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
         "mrope_section": [8, 4]}}, "mrope_section"),
        ("config.json", "text_config", {"use_sliding_window": True, "sliding_window": 32,
         "layer_types": ["sliding_attention"] * 2}, "sliding"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(
    checkpoint: Path, tmp_path: Path, file: str, part: str | None, values: dict[str, Any], message: str
) -> None:
    folder = changed(checkpoint, tmp_path / "changed", file, part, **values)
    with pytest.raises(UnsupportedModelError, match=message):
        prepare(BuildRequest(model=str(folder), output=tmp_path / "b"), write=False)


def test_a_folder_without_a_video_processor_has_its_authors_bounds() -> None:
    image = {
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "mean": [0.0] * 3, "std": [1.0] * 3,
        "rescale_factor": 1 / 255, "resample": "bicubic",
    }  # fmt: skip
    found = sampled_video({}, image, 9, 2)
    assert found == {
        "token_id": 9, "fps": 2.0, "min_frames": 4, "max_frames": 768, "min_pixels": 128 * UNIT,
        "max_pixels": 768 * UNIT, "max_rows": 115_200, "tokens_per_second": 2,
    }  # fmt: skip
    assert sampled_video({}, image, 9, 2, 100 * UNIT)["min_pixels"] == 100 * UNIT
