"""LLaVA-NeXT: tiles, and answers about pictures of any size, equal to transformers'."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import ImageInfo
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.families import get_family
from vlmexport.runtime.images.processors import preprocess
from vlmexport.runtime.images.processors.tiles import settings_of
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.tiles import Tiling

from tests.support.llava_requests import PICTURES as LAYOUT_PICTURES
from tests.support.llava_requests import TALK, processed, question

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

transformers = pytest.importorskip("transformers", reason="building the bundles needs [export]")
torch = pytest.importorskip("torch")

Bundles = Callable[[str], "TinyBundle"]
PICTURES = LAYOUT_PICTURES["llava-next"]


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Bundles) -> TinyBundle:
    return tiny_bundle("llava-next")


@pytest.fixture(scope="module")
def processor(tiny: TinyBundle) -> Any:
    return transformers.AutoProcessor.from_pretrained(tiny.checkpoint, backend="pil")


@pytest.fixture(scope="module")
def model(tiny: TinyBundle) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(tiny.checkpoint).eval()


def test_pictures_of_a_conversation_have_different_tiles(tiny: TinyBundle) -> None:
    """What `test_llava_layouts.py` compares with the processor is no picture of one tile alone."""
    prepared = get_family("llava-next").prepare(tiny.bundle, PICTURES, TALK)
    assert len({len(vision["row_index"]) for vision in prepared.vision}) == 3
    assert len({len(vision["pixel_values"]) for vision in prepared.vision}) > 1


@pytest.mark.parametrize("field", ["image", "image_token_id"])
def test_a_manifest_without_its_picture_fields_is_refused(
    tiny: TinyBundle, tmp_path: Path, field: str
) -> None:
    bundle = Bundle.open(shutil.copytree(tiny.path, tmp_path / "bundle"))
    setattr(bundle.manifest if field == "image" else bundle.manifest.text, field, None)
    with pytest.raises(BundleError, match="must be set for family 'llava-next'"):
        get_family("llava-next").prepare(bundle, PICTURES[:1], "cup")


@pytest.mark.parametrize("size", [(8, 64), (64, 8), (1, 1), (2, 300), (300, 2), (900, 1200)])
def test_answers_about_slim_tiny_and_huge_pictures_are_the_models(
    tiny: TinyBundle, processor: Any, model: Any, size: tuple[int, int]
) -> None:
    picture = Image.fromarray(synthetic_image(*size))
    inputs = processed(processor, [picture], question(1))
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    with Session.load(tiny.path) as session:
        found = session.generate(image=picture, prompt="the red cup", max_new_tokens=12)
    assert found.tokens == out[0, inputs["input_ids"].shape[1] :].tolist()


# --- the processor ---

PINPOINTS = {
    "published": [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]],
    "one": [[1, 1]],
    "long": [[1, 4], [4, 1], [2, 3], [5, 1]],
    # Of equal size: the first of equally good ones counts.
    "twice": [[2, 2], [1, 4], [4, 1], [2, 2]],
}
SIDES = (1, 2, 3, 19, 27, 28, 29, 56, 57, 84, 223)
SIZES = [(height, width) for height in SIDES for width in SIDES] + [
    (80, 640),
    (640, 80),
    (13, 104),
    (333, 500),
    (1200, 900),
    (3, 2000),
    (2000, 3),
]


def settings(side: int, patch: int, pinpoints: list[list[int]], resample: str = "bicubic") -> ImageInfo:
    described = {
        "processor": "llava-next", "height": side, "width": side, "resample": resample, "rescale_factor": 1 / 255,
        "mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": patch, "image_grid_pinpoints": canvases(side, pinpoints),
    }  # fmt: skip
    return ImageInfo.parse(described, "image")


def canvases(side: int, pinpoints: list[list[int]]) -> list[list[int]]:
    return [[side * down, side * across] for down, across in pinpoints]


@pytest.mark.parametrize(("name", "resample"), [*((n, "bicubic") for n in PINPOINTS), ("long", "bilinear")])
def test_tiles_are_those_of_llavas_processor(name: str, resample: str) -> None:
    side = 28
    reference = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side},
        image_grid_pinpoints=canvases(side, PINPOINTS[name]), resample={"bicubic": 3, "bilinear": 2}[resample],
    )  # fmt: skip
    found, rng = settings(side, 7, PINPOINTS[name], resample), np.random.default_rng(0)
    for height, width in SIZES:
        picture = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
        want = reference(images=picture, return_tensors="np")["pixel_values"][0]
        assert settings_of(found).tiles(height, width) == len(want)
        np.testing.assert_allclose(preprocess(picture, found), want, atol=1e-5, err_msg=f"{width} × {height}")


@pytest.fixture(scope="module")
def lay_out(tiny: TinyBundle) -> Callable[..., Any]:
    """transformers' own order of rows, given by (side, patch, canvases, size, rows of all tiles)."""
    kind = transformers.LlavaNextForConditionalGeneration
    config = transformers.AutoConfig.from_pretrained(tiny.checkpoint)
    with torch.device("meta"):
        model = kind(config).model

    def arranged(side: int, patch: int, pinpoints: Any, size: Any, rows: Any, newline: Any) -> Any:
        model.config.vision_config.image_size, model.config.vision_config.patch_size = side, patch
        model.config.image_grid_pinpoints = pinpoints
        found, _ = model.pack_image_features([rows], torch.tensor([size]), "default", newline)
        return found[0]

    return arranged


@pytest.mark.parametrize("name", PINPOINTS)
@pytest.mark.parametrize(("side", "patch"), [(28, 7), (32, 16), (30, 8), (336, 14), (16, 16)])
def test_rows_are_in_the_models_order(lay_out: Callable[..., Any], name: str, side: int, patch: int) -> None:
    tiling = settings_of(settings(side, patch, PINPOINTS[name]))
    pinpoints, grid = canvases(side, PINPOINTS[name]), side // patch
    counts = []
    for height, width in SIZES:
        tiles = tiling.tiles(height, width)
        numbered = torch.arange(tiles * grid**2).reshape(tiles, grid**2, 1)
        want = lay_out(side, patch, pinpoints, (height, width), numbered, torch.tensor([tiles * grid**2]))
        found = tiling.row_index(height, width)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, want[:, 0], err_msg=f"{width} × {height}")
        counts.append(len(found))
    assert max(counts) <= tiling.most_rows
    high, wide = max(tiling.canvases, key=lambda c: len(tiling.row_index(*c)))
    assert len(tiling.row_index(high, wide)) == tiling.most_rows, "a picture that fills the largest canvas"
    assert tiling.most_tiles == max(tiling.tiles(*canvas) for canvas in tiling.canvases)


def test_canvases_are_chosen_as_the_processor_does_ties_included() -> None:
    from transformers.image_processing_utils import select_best_resolution

    rng = np.random.default_rng(3)
    ties = 0
    for _ in range(400):
        side = int(rng.integers(8, 40))
        found = [tuple(int(n) for n in side * rng.integers(1, 5, 2)) for _ in range(int(rng.integers(1, 9)))]
        tiling = Tiling(side, 4, tuple(found))
        for height, width in rng.integers(1, 6 * side, (20, 2)).tolist():
            want = select_best_resolution((height, width), found)
            assert tiling.canvas(height, width) == tuple(want)
            turned = select_best_resolution((height, width), found[::-1])
            ties += turned != want
    assert ties > 50, "too few pictures for which two canvases are as good as each other"


@pytest.mark.parametrize(
    "changed",
    [
        {"patch_size": None},
        {"patch_size": 0},
        {"patch_size": 29},
        {"image_grid_pinpoints": None},
        {"image_grid_pinpoints": []},
        {"image_grid_pinpoints": [[28, 30]]},
        {"image_grid_pinpoints": [[28, 0]]},
        {"image_grid_pinpoints": [[28, 28, 28]]},
        {"image_grid_pinpoints": [28]},
        {"image_grid_pinpoints": [[28, 28 * 4096]]},
    ],
)
def test_a_manifest_without_its_tiles_is_refused(changed: dict[str, Any]) -> None:
    described = settings(28, 7, [[1, 2]])
    described.extra = {**described.extra, **changed}
    with pytest.raises(BundleError, match=r"image\.image_grid_pinpoints.*build the bundle again"):
        preprocess(PICTURES[0], described)


def test_a_manifest_whose_tiles_are_no_squares_is_refused() -> None:
    described = settings(28, 7, [[1, 2]])
    described.width = 14
    with pytest.raises(BundleError, match=r"image\.height.*build the bundle again"):
        preprocess(PICTURES[0], described)
