"""How LFM2-VL reads pictures, against transformers' own code: its image processor with Pillow in place of torchvision, which is
not here, and torch's antialiased interpolation."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.families.vision.naflex_settings import naflex_image, naflex_of
from vlmexport.runtime.bundle.manifest import ImageInfo
from vlmexport.runtime.common.errors import BundleError, ImageError, UnsupportedModelError
from vlmexport.runtime.families.lfm2_vl import Marks, described, picture_text
from vlmexport.runtime.images import naflex as naflex_module
from vlmexport.runtime.images.naflex import Naflex, antialiased_weights, tower_inputs
from vlmexport.runtime.images.processors.naflex import crops, patches_of, settings_of
from vlmexport.runtime.images.synthetic import synthetic_image

from tests.support.lfm2_processor import processed
from tests.support.tiny_lfm2 import PROCESSOR

PUBLISHED = {
    "do_image_splitting": True, "downsample_factor": 2, "encoder_patch_size": 16, "tile_size": 512, "min_tiles": 2,
    "max_tiles": 10, "use_thumbnail": True, "min_image_tokens": 64, "max_image_tokens": 256, "max_pixels_tolerance": 2.0,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255, "resample": 2,
}  # fmt: skip
SETTINGS = {
    "tiny": PROCESSOR,
    "published": PUBLISHED,
    "two tiles": {**PROCESSOR, "max_tiles": 2, "use_thumbnail": False, "image_mean": [0.4, 0.5, 0.6]},
    "whole": {**PROCESSOR, "do_image_splitting": False, "max_image_tokens": 30, "image_std": [0.2, 0.3, 0.4]},
    "many tiles": {**PROCESSOR, "max_tiles": 10},
    "odd": {**PROCESSOR, "encoder_patch_size": 4, "downsample_factor": 3, "tile_size": 24, "max_tiles": 7},
}


def info(settings: dict[str, Any]) -> tuple[ImageInfo, Naflex]:
    """As the manifest has the settings, and what the runtime reads there."""
    made = ImageInfo.parse(naflex_image(settings) | described(naflex_of(settings), 3), "image")
    return made, settings_of(made)


def differences(settings: dict[str, Any], sizes: list[tuple[int, int]]) -> list[object]:
    """Sizes whose crops, or whose text, are other than transformers'."""
    image, naflex = info(settings)
    marks = Marks("<image>", "<start>", "<end>", "<thumb>")
    named = types.SimpleNamespace(
        image_token="<image>", image_start_token="<start>", image_end_token="<end>", image_thumbnail_token="<thumb>"
    )  # fmt: skip
    wrong: list[object] = []
    for height, width in sizes:
        picture = np.ascontiguousarray(synthetic_image(height, width))
        expected = processed([picture], settings)
        made = list(crops(Image.fromarray(picture), image, naflex))
        same = len(made) == len(expected["pixel_values"])
        for crop, values, mask, shape in zip(
            made,
            expected["pixel_values"],
            expected["pixel_attention_mask"],
            expected["spatial_shapes"],
            strict=False,
        ):
            own = patches_of(crop, naflex.patch_size)
            same &= shape.tolist() == [length // naflex.patch_size for length in crop.shape[2:]]
            same &= int(mask.sum()) == len(own) and np.array_equal(own, values[: len(own)].numpy())
        rows, columns = int(expected["image_rows"][0]), int(expected["image_cols"][0])
        size = [int(side) for side in expected["image_sizes"][0]]
        text = Lfm2VlProcessor._build_image_tokens(
            named, rows, columns,  # type: ignore[arg-type]
            Lfm2VlProcessor._compute_tokens_per_tile(named, naflex.tile_size, naflex.patch_size, naflex.merge_size),  # type: ignore[arg-type]
            Lfm2VlProcessor._compute_tokens_for_image(named, size, naflex.patch_size, naflex.merge_size),  # type: ignore[arg-type]
            naflex.thumbnail, True,
        )  # fmt: skip
        grid, whole = naflex.grid(height, width), naflex.whole(height, width)
        written = picture_text(grid, naflex, naflex.units(whole), marks)
        spoken = "".join(piece if isinstance(piece, str) else "<image>" * piece for piece in written)
        if not same or spoken != text or grid != (rows, columns) or list(whole) != size:
            wrong.append((height, width))
    return wrong


def odd_sizes(count: int, most: int, seed: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    found = [
        tuple(side) for side in np.exp(rng.uniform(np.log(20), np.log(most), (count, 2))).astype(int).tolist()
    ]
    return [(high, wide) for high, wide in found if max(high, wide) <= 4 * min(high, wide)]


CASES = {
    "tiny": odd_sizes(90, 150, 1),
    "two tiles": odd_sizes(60, 120, 2),
    "whole": odd_sizes(60, 200, 3),
    "odd": odd_sizes(60, 150, 4),
    # Of grids of one ratio the size of the picture decides, and between two ratios the order.
    "many tiles": [
        *odd_sizes(40, 150, 5),
        (50, 100),
        (100, 50),
        (40, 80),
        (64, 32),
        (96, 96),
        (120, 150),
        (64, 80),
    ],
    "published": [(512, 512), (333, 777), (1080, 1920), (1500, 600), (727, 724)],
}


@pytest.mark.parametrize("name", CASES)
def test_pictures_are_cut_as_transformers_cuts_them(name: str) -> None:
    """Bit for bit, and with its text."""
    assert len(CASES[name]) >= 5
    assert differences(SETTINGS[name], CASES[name]) == []


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "grids in another order": lambda patch: patch.setattr(
        naflex_module, "_grids", lambda least, most: [(c, r) for c in range(1, most + 1) for r in range(1, most + 1)
                                                      if least <= c * r <= most][::-1]
    ),
    "large pictures whole": lambda patch: patch.setattr(
        Naflex, "grid", lambda self, height, width: (1, 1)
    ),
    "sizes rounded up": lambda patch: patch.setattr(naflex_module, "round", lambda value: int(value + 1), raising=False),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_errors_of_sizes_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTANTS[name](monkeypatch)
    assert any(differences(SETTINGS[case], CASES[case][-30:]) for case in ("tiny", "many tiles"))


def test_the_exporters_reference_is_transformers(tiny_checkpoint: Callable[..., Path]) -> None:
    family: Any = family_for(open_checkpoint(str(tiny_checkpoint("lfm2-vl"))))
    for height, width in CASES["tiny"][:25]:
        picture = np.ascontiguousarray(synthetic_image(height, width))
        expected = processed([picture], PROCESSOR)
        made = family.reference_prompt(Image.fromarray(picture), "see").vision
        for name, values in made.items():
            assert torch.equal(values, expected[name].to(values.dtype)), (name, height, width)


@pytest.mark.parametrize("have", [1, 2, 3, 7, 16, 27])
def test_tables_are_resampled_as_torch_does(have: int) -> None:
    """One side: a table of ones and zeros shows the weights; then both, of a table of numbers, unit by unit."""
    for make in range(1, 66):
        table = torch.eye(have).reshape(1, have, 1, have)
        expected = torch.nn.functional.interpolate(
            table, size=(1, make), mode="bilinear", align_corners=False, antialias=True
        )[0, :, 0].T
        assert abs(antialiased_weights(have, make) - expected.numpy()).max() <= 6e-8
    numbers = torch.randn(1, 5, have, have, generator=torch.Generator().manual_seed(have))
    for down, across in ((2, 2), (4, 6), (6, 34), (32, 32)):
        whole = torch.nn.functional.interpolate(
            numbers, size=(down, across), mode="bilinear", align_corners=False, antialias=True
        )[0].permute(1, 2, 0)
        order = np.arange(down * across, dtype=np.float32)[:, None]
        inputs = tower_inputs(order, down, across, 2, have)
        places = inputs["pixel_values"][..., 0].astype(int)
        taken = np.einsum(
            "upr,upc,nrc->upn",
            inputs["table_rows"],
            inputs["table_columns"],
            numbers[0].numpy(),
            dtype=np.float64,
        )
        expected_rows = whole.reshape(-1, 5).numpy()[places]
        np.testing.assert_allclose(taken, expected_rows, atol=1e-5)


def test_units_are_those_of_the_pixel_unshuffle() -> None:
    """The projector joins four patches in this order."""
    from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlMultiModalProjector

    order = torch.arange(6 * 4, dtype=torch.float32).reshape(1, 6, 4, 1)
    joined = Lfm2VlMultiModalProjector.pixel_unshuffle(types.SimpleNamespace(factor=2), order)  # type: ignore[arg-type]
    made = tower_inputs(order.reshape(-1, 1).numpy(), 6, 4, 2, 3)["pixel_values"]
    assert np.array_equal(made[..., 0], joined.reshape(-1, 4).numpy())


def test_a_slim_picture_is_refused() -> None:
    _, naflex = info(PUBLISHED)
    with pytest.raises(ImageError, match="100000 x 5 is too slim"):
        naflex.whole(5, 100_000)
    assert naflex.most_units == 10 * 256 + 256 and naflex.largest_run == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_size": 33}, "tile_size=33 is not a multiple"),
        ({"min_tiles": 5}, "min_tiles=5 and max_tiles=4"),
        ({"min_image_tokens": 9}, "min_image_tokens is above"),
        ({"max_image_tokens": 0}, "max_image_tokens=0"),
        ({"do_pad": False}, "do_pad=false"),
        ({"use_thumbnail": 1}, "use_thumbnail=1"),
        ({"max_pixels_tolerance": float("nan")}, "max_pixels_tolerance=nan"),
        ({"do_normalize": False}, "do_normalize=false"),
        ({"do_center_crop": True}, "do_center_crop=true"),
    ],
)
def test_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    settings = {**PROCESSOR, **changes}
    with pytest.raises(UnsupportedModelError, match=message):
        naflex_image(settings)
        naflex_of(settings)


def test_fewer_pixels_mean_fewer_tiles() -> None:
    few = naflex_of(PUBLISHED, 3 * 512 * 512)
    assert (few.min_tiles, few.max_tiles, few.max_units) == (2, 3, 256)
    none = naflex_of(PUBLISHED, 400_000)
    assert none.max_tiles == 1 and none.grid(2000, 2000) == (1, 1) and none.most_units == 256
    small = naflex_of(PUBLISHED, 100_000)
    assert small.max_units == 97 and small.units(small.whole(2000, 2000)) <= 97
    with pytest.raises(UnsupportedModelError, match="--max-pixels 1000 is too small"):
        naflex_of(PUBLISHED, 1000)


@pytest.mark.parametrize("name", ["patch_size", "max_tiles", "use_thumbnail", "max_pixels_tolerance"])
def test_a_manifest_without_a_size_is_refused(name: str) -> None:
    made, _ = info(PROCESSOR)
    made.extra = {key: value for key, value in made.extra.items() if key != name}
    with pytest.raises(BundleError, match="build the bundle again"):
        settings_of(made)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision_config", {"num_patches": 8}, "num_patches=8 is no square"),
        ("vision_config", {"patch_size": 16}, "patch_size 8 differs"),
        ("text_config", {"conv_L_cache": 1}, "conv_L_cache=1"),
        ("text_config", {"layer_types": ["conv", "conv"]}, "layer_types"),
        (None, {"downsample_factor": 1}, "merge_size 2 differs"),
        (None, {"image_token_id": 3}, "image_token_id=3"),
    ],
)
def test_configurations_are_refused_by_name(
    tiny_checkpoint: Callable[..., Path], part: str | None, changes: dict[str, Any], message: str
) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("lfm2-vl")))
    own: Any = checkpoint.config if part is None else getattr(checkpoint.config, part)
    for name, value in changes.items():
        setattr(own, name, value)
    with pytest.raises(UnsupportedModelError, match=message):
        family_for(checkpoint).image()
