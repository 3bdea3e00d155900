"""LLaVA: pictures in messages and on the command line, and its processor."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime import Session, cli
from vlmexport.runtime.bundle.manifest import ImageInfo
from vlmexport.runtime.common.errors import BundleError, ImageError, PromptError
from vlmexport.runtime.families import get_family
from vlmexport.runtime.images.processors import preprocess

from tests.support.llava_requests import PICTURES as LAYOUT_PICTURES
from tests.support.llava_requests import TALK

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

transformers = pytest.importorskip("transformers", reason="building the bundles needs [export]")
torch = pytest.importorskip("torch")

Bundles = Callable[[str], "TinyBundle"]
PICTURES = LAYOUT_PICTURES["llava"]


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Bundles) -> TinyBundle:
    return tiny_bundle("llava")


def test_pictures_in_parts_are_those_beside_the_messages(tiny: TinyBundle, tmp_path: Path) -> None:
    PICTURES[1].save(tmp_path / "b.png")
    held: list[Any] = [PICTURES[0], str(tmp_path / "b.png"), np.asarray(PICTURES[2])]
    places = iter(zip(("image", "path", "image"), held, strict=True))
    messages = [
        {**turn, "content": [part | dict([next(places)]) if part["type"] == "image" else part for part in turn["content"]]}
        for turn in TALK
    ]  # fmt: skip
    found = get_family("llava").prepare(tiny.bundle, None, messages)
    want = get_family("llava").prepare(tiny.bundle, PICTURES, TALK)
    assert found.token_ids.tolist() == want.token_ids.tolist()
    for one, other in zip(found.vision, want.vision, strict=True):
        np.testing.assert_array_equal(one["pixel_values"], other["pixel_values"])
    with Session.load(tiny.path) as session:
        plain = session.generate(images=PICTURES, messages=TALK, max_new_tokens=8)
        assert session.generate(messages=messages, max_new_tokens=8).tokens == plain.tokens
        swapped = [np.asarray(PICTURES[0])[:, :, ::-1], *held[1:]]
        assert session.generate(messages=[{"role": "user", "content": [{"type": "image", "image": swapped[0]}, {"type": "text", "text": "cup"}]}], channels="bgr", max_new_tokens=8).tokens == session.generate(PICTURES[0], "cup", max_new_tokens=8).tokens  # fmt: skip
        bad = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        outcomes = session.generate_many([{"prompt": "cup", "max_new_tokens": 2}, bad])
        assert [isinstance(outcome, PromptError) for _, outcome in sorted(outcomes, key=lambda each: each[0])] == [False, True]  # fmt: skip


def test_a_conversation_of_a_template_for_text_is_held(tiny: TinyBundle, tmp_path: Path) -> None:
    """`Session.chat` writes contents in parts, which this template would print as Python does."""
    from vlmexport.runtime.bundle.folder import Bundle

    bundle = Bundle.open(shutil.copytree(tiny.path, tmp_path / "bundle"))
    bundle.manifest.text.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    with Session.load(bundle) as session:
        chat = session.chat("the table")
        chat.say("red cup", max_new_tokens=4)
        prompt = get_family("llava").prepare(bundle, None, chat.messages[:2])
        assert bundle.tokenizer.decode(prompt.token_ids).split()[-4:] == ["table", "user:", "red", "cup"]
        with pytest.raises(PromptError, match="does not write message 0"):
            chat.say("blue cup", PICTURES[0])


def test_the_command_line_takes_several_pictures(
    tiny: TinyBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{at}.png" for at in range(2)]
    for path, picture in zip(paths, PICTURES, strict=False):
        picture.save(path)
    words = [word for path in paths for word in ("--image", str(path))]
    arguments = ["run", str(tiny.path), *words, "--prompt", "the red cup", "--max-new-tokens", "12"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    with Session.load(tiny.path) as session:
        assert (
            shown == session.generate(image=PICTURES[:2], prompt="the red cup", max_new_tokens=12).text + "\n"
        )


def test_models_of_one_picture_refuse_several(tiny_bundle: Bundles) -> None:
    bundle = tiny_bundle("t5").bundle
    family = get_family("blip2")
    one = family.prepare(bundle, PICTURES[:1], "cup")
    assert one.token_ids.tolist() == family.prepare(bundle, PICTURES[0], "cup").token_ids.tolist()
    with pytest.raises(ImageError, match="one image at a time, 2 were given"):
        family.prepare(bundle, PICTURES[:2], "cup")


# --- the processor ---

SIZES = [(w, h) for w in (1, 31, 32, 33, 64, 97) for h in (1, 8, 32, 47, 260)] + [
    (640, 80),
    (80, 640),
    (333, 500),
]


def settings(side: int, short: int) -> ImageInfo:
    described = {
        "processor": "clip", "height": side, "width": side, "resample": "bicubic", "rescale_factor": 1 / 255,
        "mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711],
        "shortest_edge": short,
    }  # fmt: skip
    return ImageInfo.parse(described, "image")


@pytest.mark.parametrize(("side", "short"), [(32, 32), (28, 40), (45, 32)])
def test_pixels_equal_clips_processor(side: int, short: int) -> None:
    reference = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": short}, crop_size={"height": side, "width": side}
    )
    rng = np.random.default_rng(0)
    for width, height in SIZES:
        picture = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
        want = reference(images=picture, return_tensors="np")["pixel_values"]
        np.testing.assert_allclose(
            preprocess(picture, settings(side, short)), want, atol=1e-5, err_msg=f"{width} × {height}"
        )


def test_a_manifest_without_the_shortest_edge_is_refused(tiny: TinyBundle) -> None:
    described = settings(32, 32)
    described.extra = {}
    with pytest.raises(BundleError, match="shortest_edge"):
        preprocess(PICTURES[0], described)
