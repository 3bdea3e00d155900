"""LLaVA and LLaVA-NeXT: layouts and answers equal to transformers', with any number of pictures anywhere."""

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
from vlmexport.runtime.common.errors import ImageError, PromptError
from vlmexport.runtime.families import RawPrompt, get_family

from tests.support.answers import check_answer
from tests.support.llava_requests import PICTURES, TALK, processed, question

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

transformers = pytest.importorskip("transformers", reason="building the bundles needs [export]")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=PICTURES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tiny(family: str, tiny_bundle: Callable[[str], TinyBundle]) -> TinyBundle:
    return tiny_bundle(family)


@pytest.fixture(scope="module")
def pictures(family: str) -> list[Image.Image]:
    return PICTURES[family]


@pytest.fixture(scope="module")
def processor(tiny: TinyBundle) -> Any:
    return transformers.AutoProcessor.from_pretrained(tiny.checkpoint, backend="pil")


def check_prepared(prepared: Any, inputs: Any, tiny: TinyBundle) -> None:
    """Tokens and pictures are the processor's, which pads the number of tiles; the rows fill the slots."""
    assert prepared.token_ids.tolist() == inputs["input_ids"][0].tolist()
    assert len(prepared.vision) == len(inputs["pixel_values"])
    rows = 0
    for vision, pixels in zip(prepared.vision, inputs["pixel_values"].numpy(), strict=True):
        found, tiled = vision["pixel_values"], pixels.ndim == 4
        count = len(found) if tiled else 1
        np.testing.assert_allclose(found, pixels[:count] if tiled else pixels[None], atol=1e-5)
        assert not tiled or not pixels[count:].any()
        rows += len(vision["row_index"]) if tiled else tiny.bundle.manifest.text.image_rows
    assert len(prepared.image_positions) == rows


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_text_follows_its_pictures(
    family: str, tiny: TinyBundle, pictures: list[Any], processor: Any, count: int
) -> None:
    prepared = get_family(family).prepare(tiny.bundle, pictures[:count], "the red cup")
    inputs = processed(processor, pictures[:count], question(count))
    if count:
        check_prepared(prepared, inputs, tiny)
    else:
        assert prepared.token_ids.tolist() == inputs["input_ids"][0].tolist()
        assert not prepared.vision and prepared.image_positions is None


def test_a_conversation_has_pictures_in_any_turn(
    family: str, tiny: TinyBundle, pictures: list[Any], processor: Any
) -> None:
    prepared = get_family(family).prepare(tiny.bundle, pictures, TALK)
    check_prepared(prepared, processed(processor, pictures, TALK), tiny)
    assert prepared.image_positions is not None
    assert (np.diff(prepared.image_positions) > 1).sum() == 2, "two gaps between three pictures"


def test_raw_prompt_places_its_pictures(
    family: str, tiny: TinyBundle, pictures: list[Any], processor: Any
) -> None:
    text = "USER: the <image> and <image>\nwhere is it ASSISTANT:"
    prepared = get_family(family).prepare(tiny.bundle, pictures[:2], RawPrompt(text))
    check_prepared(prepared, processor(images=pictures[:2], text=text, return_tensors="pt"), tiny)
    first = get_family(family).prepare(tiny.bundle, pictures[:1], RawPrompt("the cup"))
    assert first.image_positions is not None and first.image_positions[0] < 3, (
        "without a mark the pictures come first"
    )


def test_a_bundle_without_a_template_puts_pictures_first(
    family: str, tiny: TinyBundle, pictures: list[Any], tmp_path: Path, processor: Any
) -> None:
    bundle = Bundle.open(shutil.copytree(tiny.path, tmp_path / "bundle"))
    bundle.manifest.text.chat_template = None
    prepared = get_family(family).prepare(bundle, pictures[:2], "the cup")
    inputs = processor(images=pictures[:2], text="<image>\n<image>\nthe cup", return_tensors="pt")
    check_prepared(prepared, inputs, tiny)
    with pytest.raises(PromptError, match="no chat template"):
        get_family(family).prepare(bundle, pictures[:2], TALK)


@pytest.mark.parametrize(
    ("count", "prompt", "message"),
    [
        (1, TALK, "the prompt has 3 <image>, and 1 pictures were given"),
        (2, RawPrompt("a <image>"), "has 1 <image>, and 2 pictures"),
        (1, "a <image>", "stands for one of the pictures"),
        (0, [{"role": "user", "content": "a <image>"}], "stands for one of the pictures"),
        (1, ["cup"], "message 0"),
        (60, "cup", "image rows included"),
        (1, b"\xff", "UTF-8"),
    ],
)
def test_invalid_layout_is_refused(
    family: str, tiny: TinyBundle, pictures: list[Any], count: int, prompt: Any, message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        get_family(family).prepare(tiny.bundle, (pictures * 20)[:count], prompt)


def test_a_picture_that_is_not_there_is_refused(family: str, tiny: TinyBundle) -> None:
    with pytest.raises(ImageError, match=r"nowhere\.png"):
        get_family(family).prepare(tiny.bundle, ["nowhere.png"], "cup")


@pytest.mark.parametrize("messages", [TALK, [TALK[2]]], ids=["talk", "one"])
def test_answers_equal_transformers(
    tiny: TinyBundle, pictures: list[Any], processor: Any, messages: list[Any]
) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny.checkpoint).eval()
    pictures = pictures[: sum(part["type"] == "image" for turn in messages for part in turn["content"])]
    check_answer(tiny, model, processed(processor, pictures, messages), pictures, messages)


def test_batch_with_different_numbers_of_pictures(tiny: TinyBundle, pictures: list[Any]) -> None:
    requests = [{"image": pictures[:n], "prompt": f"the cup {n}", "max_new_tokens": 12} for n in range(4)]
    with Session.load(tiny.path, max_batch=4) as session:
        together = session.generate_batch(requests)
        assert [r.tokens for r in together] == [session.generate(**request).tokens for request in requests]
