"""InternVL: tiles, prompts and answers about pictures of any size, equal to transformers' own."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import ImageInfo
from vlmexport.runtime.common.errors import BundleError, ImageError, PromptError
from vlmexport.runtime.families import get_family
from vlmexport.runtime.families.plain import PlainText
from vlmexport.runtime.images import processors
from vlmexport.runtime.images.aspect_tiles import AspectTiling
from vlmexport.runtime.images.processors import aspect_tiles, preprocess
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.video import Video

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

transformers = pytest.importorskip("transformers", reason="building the bundles needs [export]")
torch = pytest.importorskip("torch")

Bundles = Callable[[str], "TinyBundle"]
TOKENS = 10
SIDE = 28
DRAFTS = (
    "none",
    "early-exit",
    "imitation",
    "prompt-lookup",
    "medusa",
    "eagle",
    "eagle3",
    "vispec",
    "draft-and-verify",
)


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(synthetic_image(height, width))


PICTURES = [picture(*size) for size in ((64, 48), (50, 131), (33, 33))]
"""Of 13, 11 and 1 tiles."""
TALK: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "the red cup"}, {"type": "image"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "it is on the table"}]},
    {"role": "user", "content": [{"type": "text", "text": "and here"}, {"type": "image"}]},
]


def filled(messages: list[dict[str, Any]], pictures: list[Image.Image]) -> list[dict[str, Any]]:
    """The messages with their pictures in the parts, where transformers looks for them."""
    left = iter(pictures)
    return [
        {
            **turn,
            "content": [{**p, "image": next(left)} if p["type"] == "image" else p for p in turn["content"]],
        }
        for turn in messages
    ]


def question(count: int) -> list[dict[str, Any]]:
    content = [*[{"type": "image"}] * count, {"type": "text", "text": "what is on the table ?"}]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Bundles) -> TinyBundle:
    return tiny_bundle("internvl")


@pytest.fixture(scope="module")
def processor(tiny: TinyBundle) -> Any:
    from tests.support.internvl_processor import processor_of

    return processor_of(tiny.checkpoint)


@pytest.fixture(scope="module")
def model(tiny: TinyBundle) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(tiny.checkpoint).eval()


def inputs_of(processor: Any, messages: list[dict[str, Any]], pictures: list[Image.Image]) -> Any:
    return processor.apply_chat_template(
        filled(messages, pictures),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def generated(model: Any, inputs: Any) -> list[int]:
    with torch.no_grad():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    ("messages", "pictures"),
    [(TALK, PICTURES), (question(0), []), (question(1), PICTURES[:1]), (question(2), PICTURES[1:])],
    ids=["conversation", "no picture", "one picture", "two pictures"],
)
def test_prompts_and_tiles_are_those_of_internvls_processor(
    tiny: TinyBundle, processor: Any, messages: list[dict[str, Any]], pictures: list[Image.Image]
) -> None:
    wanted = inputs_of(processor, messages, pictures)
    prepared = get_family("internvl").prepare(tiny.bundle, pictures or None, messages)
    assert prepared.token_ids.tolist() == wanted["input_ids"][0].tolist()
    tiles = [run["pixel_values"] for run in prepared.vision]
    assert [len(each) for each in tiles] == [{48: 13, 131: 11, 33: 1}[p.width] for p in pictures]
    if pictures:
        assert np.array_equal(np.concatenate(tiles), wanted["pixel_values"].numpy())


@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_are_the_models_with_every_draft(
    tiny: TinyBundle, processor: Any, model: Any, draft: str
) -> None:
    proposed = 0
    options = {} if draft == "none" else {"draft_length": 3}
    with Session.load(tiny.path) as session:
        for messages, pictures in (
            (TALK, PICTURES),
            (question(0), []),
            *((question(1), [picture(*size)]) for size in ((75, 40), (41, 90), (97, 61))),
        ):
            found = session.generate(
                images=pictures or None, prompt=messages, max_new_tokens=TOKENS, draft=draft, **options
            )
            assert found.tokens == generated(model, inputs_of(processor, messages, pictures))
            proposed += found.stats.proposed
    assert draft in ("none", "prompt-lookup") or proposed > 0


@pytest.mark.parametrize("size", [(8, 64), (64, 8), (1, 1), (2, 300), (300, 2), (900, 1200)])
def test_answers_about_slim_tiny_and_huge_pictures_are_the_models(
    tiny: TinyBundle, processor: Any, model: Any, size: tuple[int, int]
) -> None:
    asked = question(1), [picture(*size)]
    with Session.load(tiny.path) as session:
        found = session.generate(images=asked[1], prompt=asked[0], max_new_tokens=TOKENS)
    assert found.tokens == generated(model, inputs_of(processor, *asked))


# --- tiles ---


def settings(least: int = 1, most: int = 12, side: int = SIDE, resample: str = "bicubic") -> ImageInfo:
    return ImageInfo(
        processor="got-ocr2",
        height=side,
        width=side,
        resample=resample,
        rescale_factor=1 / 255,
        mean=[0.485, 0.456, 0.406],
        std=[0.229, 0.224, 0.225],
        extra={"min_patches": least, "max_patches": most, "image_seq_length": 1},
    )


def reference(least: int = 1, most: int = 12, side: int = SIDE, resample: int = 3) -> Any:
    return transformers.GotOcr2ImageProcessorPil(
        size={"height": side, "width": side}, crop_to_patches=True, min_patches=least, max_patches=most, resample=resample,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip


def sizes(count: int, seed: int, largest: int = 150) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(1, largest), draw.randint(1, largest)) for _ in range(count)]


def differing(own: ImageInfo, theirs: Any, asked: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The sizes whose tiles are not transformers' bit for bit."""
    found = []
    for size in asked:
        wanted = theirs(images=picture(*size), return_tensors="np")["pixel_values"]
        made = preprocess(picture(*size), own)
        if made.shape != wanted.shape or made.tobytes() != wanted.astype(np.float32, copy=False).tobytes():
            found.append(size)
    return found


@pytest.mark.parametrize(
    ("least", "most", "count"), [(1, 12, 200), (1, 6, 40), (3, 7, 40), (1, 1, 20), (1, 2, 20)]
)
def test_tiles_are_those_of_transformers_bit_for_bit(least: int, most: int, count: int) -> None:
    asked = [*sizes(count, most), (20, 20), (3, 3), (1, 1)]
    assert differing(settings(least, most), reference(least, most), asked) == []
    seen = Counter(AspectTiling(SIDE, least, most).tiles(*size) for size in asked)
    if (least, most) == (1, 12):
        assert seen.keys() == {1, *range(3, 14)}


@pytest.mark.parametrize(("resample", "name"), [(1, "lanczos"), (2, "bilinear")])
def test_tiles_of_another_filter_and_of_the_published_side(resample: int, name: str) -> None:
    assert differing(settings(resample=name), reference(resample=resample), sizes(12, 5)) == []
    large = settings(side=448, resample=name), reference(side=448, resample=resample)
    assert differing(*large, [(480, 640), (1, 90), (449, 1343)]) == []


def columns_first(image: Image.Image, own: ImageInfo) -> np.ndarray:
    tiles, (rows, columns) = (
        REAL(image, own),
        aspect_tiles.settings_of(own)[0].grid(image.height, image.width),
    )
    count = rows * columns
    turned = (
        tiles[:count].reshape(rows, columns, *tiles.shape[1:]).swapaxes(0, 1).reshape(tiles[:count].shape)
    )
    return np.concatenate([turned, tiles[count:]])


def thumbnail_first(image: Image.Image, own: ImageInfo) -> np.ndarray:
    return np.roll(REAL(image, own), 1, axis=0)


REAL = aspect_tiles.preprocess
MUTANTS = {"columns first": columns_first, "thumbnail first": thumbnail_first}


@pytest.mark.parametrize("name", MUTANTS)
def test_tiles_in_another_order_are_seen_and_change_answers(
    tiny: TinyBundle, processor: Any, model: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Planted errors: neither the comparison of tiles nor that of answers passes."""
    monkeypatch.setitem(processors.PROCESSORS, "got-ocr2", MUTANTS[name])
    asked = [size for size in sizes(60, 1) if min(AspectTiling(SIDE, 1, 12).grid(*size)) > 1]
    assert len(asked) >= 10
    assert differing(settings(), reference(), asked) == asked
    answers = []
    with Session.load(tiny.path) as session:
        for size in ((64, 48), (48, 64), (90, 62), (60, 90)):
            asked_one = question(1), [picture(*size)]
            found = session.generate(images=asked_one[1], prompt=asked_one[0], max_new_tokens=TOKENS)
            answers.append(found.tokens == generated(model, inputs_of(processor, *asked_one)))
    assert answers.count(False) >= 3


def test_grids_are_chosen_as_the_processor_does_ties_included() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    draw, ties = random.Random(3), 0
    for _ in range(6000):
        least = draw.randint(1, 6)
        tiling = AspectTiling(draw.choice((28, 448)), least, draw.randint(least, 14))
        size = draw.randint(1, 1500), draw.randint(1, 1500)
        if draw.random() < 0.4:  # ratios that several grids have
            unit, (down, across) = draw.randint(1, 500), draw.choice(((1, 1), (1, 2), (2, 1), (3, 2), (1, 3)))
            size, ties = (unit * down, unit * across), ties + 1
        columns, rows = get_optimal_tiled_canvas(size, (tiling.side,) * 2, tiling.min_tiles, tiling.max_tiles)
        assert tiling.grid(*size) == (rows, columns), (tiling, size)
    assert ties > 2000


def test_typed_special_tokens_are_text_in_a_plain_text_session(tiny: TinyBundle) -> None:
    """Those around a picture stay special: the layout writes them, not the caller."""
    asked: dict[str, Any] = {"images": [PICTURES[1]], "max_new_tokens": TOKENS}
    family = get_family("internvl")
    start = tiny.bundle.tokenizer.id("<img>")
    plain = PlainText(tiny.bundle)
    for words, brought in (("a red cup", 0), ("a <img> cup", 1)):
        usual = family.prepare(tiny.bundle, asked["images"], words).token_ids.tolist()
        read = family.prepare(plain, asked["images"], words).token_ids.tolist()
        assert (usual.count(start), read.count(start)) == (1 + brought, 1)
        assert (usual == read) == (not brought)
    with Session.load(tiny.path) as session:
        same = session.generate(**asked, prompt="a red cup", plain_text=True).tokens
        assert same == session.generate(**asked, prompt="a red cup").tokens
        session.generate(**asked, prompt="a <img> cup", plain_text=True)


# --- what is refused ---


@pytest.mark.parametrize("field", ["image", "image_token_id", "start_image_token", "end_image_token"])
def test_a_manifest_without_its_picture_fields_is_refused(
    tiny: TinyBundle, tmp_path: Path, field: str
) -> None:
    bundle = Bundle.open(shutil.copytree(tiny.path, tmp_path / "bundle"))
    assert bundle.manifest.image is not None
    if field in bundle.manifest.image.extra:
        del bundle.manifest.image.extra[field]
    else:
        setattr(bundle.manifest if field == "image" else bundle.manifest.text, field, None)
    with pytest.raises(BundleError, match="must be set for family 'internvl'"):
        get_family("internvl").prepare(bundle, PICTURES[:1], "cup")


@pytest.mark.parametrize(
    "changed",
    [
        {"height": None}, {"width": 56}, {"min_patches": 0}, {"min_patches": 13}, {"max_patches": 65}, {"max_patches": True},
        {"max_patches": None}, {"image_seq_length": 0}, {"image_seq_length": 1.5},
    ],
)  # fmt: skip
def test_a_manifest_without_its_tiles_is_refused(changed: dict[str, Any]) -> None:
    own = settings()
    sides = {name: value for name, value in changed.items() if name in ("height", "width")}
    own = replace(own, **sides, extra={**own.extra, **{n: v for n, v in changed.items() if n not in sides}})
    with pytest.raises(BundleError, match=r"image\.height, image\.width, image\.min_patches, .* must be set"):
        preprocess(picture(40, 60), own)


def test_videos_and_typed_marks_are_refused(tiny: TinyBundle) -> None:
    family = get_family("internvl")
    with pytest.raises(ImageError, match="reads pictures, no videos"):
        family.prepare(tiny.bundle, Video([picture(40, 60)] * 4, 2.0), "what moves ?")
    with pytest.raises(PromptError, match="the prompt contains '<IMG_CONTEXT>'"):
        family.prepare(tiny.bundle, PICTURES[:1], "a <IMG_CONTEXT> cup")
