"""Qwen3-VL: the table of positions, frames and times of videos, and pictures, beside transformers'."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime.bundle.manifest import ImageInfo, VideoInfo
from vlmexport.runtime.common.errors import ImageError
from vlmexport.runtime.families import get_family
from vlmexport.runtime.families.qwen3_vl import timed, tower_inputs
from vlmexport.runtime.images.grid import Grid, patchified
from vlmexport.runtime.images.processors import preprocess
from vlmexport.runtime.images.processors.patches import settings_of
from vlmexport.runtime.images.sampling.qwen3_vl import fitted_volume, sample_video
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.video import Video

GRID = Grid(16, 2, 2)
UNIT = 32 * 32
INFO: dict[str, Any] = {
    "token_id": 9, "fps": 2.0, "min_frames": 4, "max_frames": 768, "min_pixels": 4096, "max_pixels": 25165824,
}  # fmt: skip


@pytest.fixture(scope="module")
def videos() -> Iterator[Any]:
    """transformers' module, which imports torchvision for what is not used here."""
    pytest.importorskip("transformers", reason="compares with transformers")
    names = [
        f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        yield import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")


# --- pictures ---


@pytest.mark.parametrize("side", [48, 5])
def test_the_table_is_resampled_as_transformers_does(side: int) -> None:
    torch = pytest.importorskip("torch", reason="compares with transformers")
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    for down in range(1, 65):
        widths = range(1, 65)
        thw = torch.tensor([[1, 2 * down, 2 * across] for across in widths])
        places, weights = get_vision_interpolation_indices_and_weights(
            thw, num_grid_per_side=side, align_corners=True, spatial_merge_size=2
        )
        mine = [
            tower_inputs(np.zeros((down * across * 4, 1), np.float32), down, across, GRID, side)
            for across in widths
        ]
        found = np.concatenate([each["table_indices"].reshape(-1, 4) for each in mine])
        np.testing.assert_array_equal(found, places.numpy())
        found = np.concatenate([each["table_weights"].reshape(-1, 4) for each in mine])
        np.testing.assert_array_equal(found.view(np.int32), weights.numpy().view(np.int32))


def test_pixels_equal_the_processors_for_odd_sizes() -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    bounds = {"shortest_edge": 4 * UNIT, "longest_edge": 24 * UNIT}
    reference = transformers.Qwen2VLImageProcessorPil(patch_size=16, size=bounds, **normal)
    described = {
        "processor": "qwen2-vl", "height": None, "width": None, "resample": "bicubic", "rescale_factor": 1 / 255,
        "mean": [0.5] * 3, "std": [0.5] * 3, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "min_pixels": 4 * UNIT, "max_pixels": 24 * UNIT,
    }  # fmt: skip
    info = ImageInfo.parse(described, "image")
    sizes = [(w, h) for w in range(1, 320, 17) for h in range(1, 260, 19)]
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            continue
        picture = Image.fromarray(synthetic_image(height, width))
        want = reference(images=picture, return_tensors="np")
        patches = patchified(np.repeat(preprocess(picture, info), 2, axis=0), settings_of(info)[0])
        np.testing.assert_allclose(patches, want["pixel_values"], atol=1e-6, err_msg=f"{width} × {height}")
    assert len(sizes) >= 200


# --- videos ---


@pytest.mark.parametrize("fps", [0.5, 2.0, 10.0, 23.976, 30.0])
def test_frames_and_times_are_those_of_the_processor(videos: Any, fps: float) -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    info, frame = VideoInfo(**INFO), Image.fromarray(synthetic_image(40, 50))
    own = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    for count in (2, 3, 4, 5, 7, 16, 17, 30, 101):
        found = sample_video(Video([frame] * count, fps=fps), info, GRID)
        metadata = SimpleNamespace(total_num_frames=count, fps=fps)
        want = videos.Qwen3VLVideoProcessor.sample_frames(own, metadata)
        assert found.chosen == want.tolist()
        processor: Any = None
        times = Qwen3VLProcessor._calculate_timestamps(processor, want.tolist(), fps, 2)
        assert found.timestamps == times and found.steps == len(times)


def test_frames_have_the_processors_size(videos: Any) -> None:
    for frames in (2, 3, 7, 64):
        for height, width in ((5, 9), (31, 32), (97, 45), (480, 640), (1080, 1920), (33, 3000)):
            for least, most in ((4096, 25165824), (8 * UNIT, 64 * UNIT), (1 << 20, 1 << 22)):
                want = videos.smart_resize(
                    frames, height, width, factor=32, min_pixels=least, max_pixels=most
                )
                assert fitted_volume(frames, height, width, GRID, least, most) == want


def test_a_frame_of_a_short_video_can_be_bounded(videos: Any) -> None:
    frame = Image.fromarray(synthetic_image(40, 50))
    free = sample_video(Video([frame] * 8, fps=4.0), VideoInfo(**INFO), GRID)
    assert (free.least, free.most) == (4096, 25165824)
    capped = sample_video(Video([frame] * 8, fps=4.0), VideoInfo(**INFO, max_frame_rows=10), GRID)
    assert capped.most == 10 * UNIT * len(capped.chosen)


def test_one_frame_is_no_video() -> None:
    frame = Image.fromarray(synthetic_image(40, 50))
    with pytest.raises(ImageError, match="give it as a picture"):
        sample_video(Video([frame], fps=4.0), VideoInfo(**INFO), GRID)


def test_each_time_step_stands_behind_its_seconds() -> None:
    pieces = timed([0.25, 1.5], 6)
    assert pieces == (
        "<0.2 seconds><|vision_start|>", 6, "<|vision_end|><1.5 seconds><|vision_start|>", 6, "<|vision_end|>",
    )  # fmt: skip


def test_steps_of_a_video_have_positions_of_their_own(tiny_bundle: Callable[[str], Any]) -> None:
    bundle = tiny_bundle("qwen3-vl").bundle
    frames = [Image.fromarray(np.roll(synthetic_image(60, 90), 4 * at, axis=1)) for at in range(6)]
    prepared = get_family("qwen3-vl").prepare(bundle, Video(frames, fps=2.0), "What moves?")
    (view,) = prepared.views
    assert prepared.positions is not None and prepared.image_positions is not None
    steps = prepared.image_positions.reshape(3, -1)
    assert view.spans == (steps.shape[1],) * 3
    for step in steps:
        time = prepared.positions[0, step]
        assert (time == time[0]).all(), "a time step is one instant"
    assert (np.diff([prepared.positions[0, step[0]] for step in steps]) > 1).all(), "text stands between them"
