"""Qwen2.5-VL: layouts, pictures, positions and answers equal to transformers', with any number of pictures of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.manifest import ImageInfo
from vlmexport.runtime.common.errors import BundleError, ImageError, PromptError
from vlmexport.runtime.families import RawPrompt, get_family
from vlmexport.runtime.images.grid import patchified
from vlmexport.runtime.images.processors import preprocess
from vlmexport.runtime.images.processors.patches import settings_of
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.windows import windows

from tests.support.answers import check_answer

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

transformers = pytest.importorskip("transformers", reason="building the bundles needs [export]")
torch = pytest.importorskip("torch")

Bundles = Callable[[str], "TinyBundle"]
PICTURES = [Image.fromarray(synthetic_image(*size)) for size in ((50, 70), (150, 60), (64, 64))]
MARK = "<|image_pad|>"
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "the table is green"},
    {
        "role": "user",
        "content": [
            {"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"},
            {"type": "text", "text": "the red cup"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "it is on the table"}]},
    {"role": "user", "content": [{"type": "text", "text": "what is left of the cup"}, {"type": "image"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Bundles) -> TinyBundle:
    return tiny_bundle("qwen2.5-vl")


@pytest.fixture(scope="module")
def processor(tiny: TinyBundle) -> Any:
    """transformers' processor but for its videos, which need torchvision: only `__init__` asks for them."""
    kind = transformers.Qwen2_5_VLProcessor
    made = object.__new__(kind)
    made.tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint)
    made.image_processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(tiny.checkpoint)
    made.chat_template = made.tokenizer.chat_template
    made.image_token, made.video_token = MARK, "<|video_pad|>"
    made.image_token_id, made.video_token_id = made.tokenizer.convert_tokens_to_ids([MARK, "<|video_pad|>"])
    made.video_processor = None
    return made


@pytest.fixture(scope="module")
def model(tiny: TinyBundle) -> Any:
    return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.checkpoint).eval()


def made(processor: Any, images: list[Any], messages: list[Any]) -> Any:
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return processor(images=images or None, text=text, return_tensors="pt")


def asked(count: int) -> list[dict[str, Any]]:
    content = [*[{"type": "image"}] * count, {"type": "text", "text": "the red cup"}]
    return [{"role": "user", "content": content}]


def same_positions(model: Any, inputs: Any, found: np.ndarray | None) -> None:
    if "image_grid_thw" not in inputs:
        assert found is None
        return
    kinds = (inputs["input_ids"] == model.config.image_token_id).long()
    want, _ = model.model.get_rope_index(inputs["input_ids"], kinds, inputs["image_grid_thw"])
    assert found is not None
    np.testing.assert_array_equal(found, want[:, 0])


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_text_follows_its_pictures(tiny: TinyBundle, processor: Any, model: Any, count: int) -> None:
    prepared = get_family("qwen2.5-vl").prepare(tiny.bundle, PICTURES[:count], "the red cup")
    inputs = made(processor, PICTURES[:count], asked(count))
    assert prepared.token_ids.tolist() == inputs["input_ids"][0].tolist()
    assert len(prepared.vision) == count
    same_positions(model, inputs, prepared.positions)


def test_a_conversation_has_pictures_in_any_turn(tiny: TinyBundle, processor: Any, model: Any) -> None:
    prepared = get_family("qwen2.5-vl").prepare(tiny.bundle, PICTURES, TALK)
    inputs = made(processor, PICTURES, TALK)
    assert prepared.token_ids.tolist() == inputs["input_ids"][0].tolist()
    same_positions(model, inputs, prepared.positions)
    rows = [len(vision["unit_order"]) for vision in prepared.vision]
    assert (
        len(set(rows)) > 1
        and prepared.image_positions is not None
        and len(prepared.image_positions) == sum(rows)
    )


def test_raw_prompt_places_its_pictures(tiny: TinyBundle, processor: Any, model: Any) -> None:
    text = f"the {MARK} and <|vision_start|>{MARK}<|vision_end|> where is it"
    prepared = get_family("qwen2.5-vl").prepare(tiny.bundle, PICTURES[:2], RawPrompt(text))
    inputs = processor(images=PICTURES[:2], text=text, return_tensors="pt")
    assert prepared.token_ids.tolist() == inputs["input_ids"][0].tolist()
    same_positions(model, inputs, prepared.positions)
    first = get_family("qwen2.5-vl").prepare(tiny.bundle, PICTURES[:1], RawPrompt("the cup"))
    assert first.image_positions is not None and first.image_positions[0] == 1, (
        "without a mark the pictures come first"
    )


@pytest.mark.parametrize(
    ("images", "prompt", "error", "message"),
    [
        (PICTURES[:1], TALK, PromptError, r"the prompt has 3 <\|image_pad\|>, and 1 pictures were given"),
        (PICTURES[:2], RawPrompt(f"a {MARK}"), PromptError, r"has 1 <\|image_pad\|>, and 2 pictures"),
        (PICTURES[:1], f"a {MARK}", PromptError, "stands for one of the pictures"),
        ([], [{"role": "user", "content": f"a {MARK}"}], PromptError, "stands for one of the pictures"),
        (PICTURES[:1], ["cup"], PromptError, "message 0"),
        (PICTURES * 40, "cup", PromptError, "image rows included"),
        (["nowhere.png"], "cup", ImageError, "nowhere.png"),
        ([Image.new("RGB", (2010, 10))], "cup", ImageError, "2010 x 10 is slimmer than 1:200"),
        (PICTURES[:1], b"\xff", PromptError, "UTF-8"),
    ],
)
def test_invalid_layout_is_refused(
    tiny: TinyBundle, images: Any, prompt: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        get_family("qwen2.5-vl").prepare(tiny.bundle, images, prompt)


@pytest.mark.parametrize("messages", [TALK, asked(1)], ids=["talk", "one"])
def test_answers_equal_transformers(
    tiny: TinyBundle, processor: Any, model: Any, messages: list[Any]
) -> None:
    parts = [part for turn in messages for part in turn["content"] if isinstance(part, dict)]
    pictures = PICTURES[: sum(part["type"] == "image" for part in parts)]
    inputs = made(processor, pictures, messages)
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).long()
    check_answer(tiny, model, inputs, pictures, messages)


def test_batch_with_different_numbers_of_pictures(tiny: TinyBundle) -> None:
    requests = [{"image": PICTURES[:n], "prompt": f"the cup {n}", "max_new_tokens": 12} for n in range(4)]
    with Session.load(tiny.path, max_batch=4) as session:
        together = session.generate_batch(requests)
        assert [r.tokens for r in together] == [session.generate(**request).tokens for request in requests]


# --- the processor ---

SIZES = [(w, h) for w in (1, 27, 29, 56, 97) for h in (1, 13, 28, 47, 160)] + [
    (640, 80),
    (80, 640),
    (333, 500),
    (1200, 900),
    (42, 70),  # halves of a unit, which round to the even one
]
BOUNDS = [(4 * 784, 24 * 784), (784, 784), (56 * 56, 12845056)]


def settings(least: int, most: int) -> ImageInfo:
    described = {
        "processor": "qwen2-vl", "height": None, "width": None, "resample": "bicubic", "rescale_factor": 1 / 255,
        "mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "min_pixels": least, "max_pixels": most,
    }  # fmt: skip
    return ImageInfo.parse(described, "image")


@pytest.mark.parametrize(("least", "most"), BOUNDS)
def test_pixels_equal_qwens_processor(least: int, most: int) -> None:
    reference = transformers.Qwen2VLImageProcessorPil(size={"shortest_edge": least, "longest_edge": most})
    found, rng = settings(least, most), np.random.default_rng(0)
    grid = settings_of(found)[0]
    for width, height in SIZES:
        picture = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
        want = reference(images=picture, return_tensors="np")
        pixels = preprocess(picture, found)
        size = tuple(side // grid.patch_size for side in pixels.shape[2:])
        assert (1, *size) == tuple(want["image_grid_thw"][0]), f"{width} × {height}"
        patches = patchified(np.repeat(pixels, 2, axis=0), grid)
        np.testing.assert_allclose(patches, want["pixel_values"], atol=1e-5, err_msg=f"{width} × {height}")


@pytest.mark.parametrize("down", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("across", [1, 3, 4, 5, 12])
def test_windows_equal_transformers(tiny: TinyBundle, down: int, across: int) -> None:
    from transformers.vision_utils import get_vision_window_index

    grid = settings_of(settings(784, 784 * 100))[0]
    thw = torch.tensor([[1, down * grid.merge_size, across * grid.merge_size]])
    order, ends = get_vision_window_index(thw, grid.merge_size, 112, grid.patch_size)
    pixels = np.arange(down * across * grid.patches, dtype=np.float32)[:, None]
    found = windows(pixels, down, across, grid, 112)
    starts = found["pixel_values"][:, 0, 0] // grid.patches
    np.testing.assert_array_equal(starts, order)
    np.testing.assert_array_equal(starts[found["unit_order"]], np.arange(down * across))
    seen = found["window_mask"][:, 0, 0].sum(-1)
    np.testing.assert_array_equal(np.cumsum(seen), ends[1:])
    flat = found["window_units"].reshape(-1)
    np.testing.assert_array_equal(flat[found["unit_places"]], np.arange(down * across))


@pytest.mark.parametrize(
    "changed", [{"patch_size": 0}, {"min_pixels": 10**6}, {"merge_size": "2"}, {"temporal_patch_size": None}]
)
def test_invalid_patch_grid_is_refused(changed: dict[str, Any]) -> None:
    described = settings(784, 7840)
    described.extra = {**described.extra, **changed}
    with pytest.raises(BundleError, match=rf"image\.{next(iter(changed))}.*build the bundle again"):
        preprocess(PICTURES[0], described)
