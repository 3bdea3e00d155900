"""Pictures that did not change: the tower sees them once, and prompts that begin with them are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime import Session
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.families.base import View
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.video_input import Video
from vlmexport.runtime.session.picture_cache import PictureCache, difference, embeds_of
from vlmexport.runtime.speedup.stats import Stats

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

Bundles = Callable[[str], "TinyBundle"]
PICTURES = [synthetic_image(*size) for size in ((50, 70), (150, 60), (64, 64))]
GREY = np.full((64, 64, 3), 100, np.uint8)
FAMILIES = ["qwen2.5-vl", "llava", "llava-next", "internvl", "smolvlm", "blip2-opt", "t5", "vit-gpt2"]
CROSSING = ["t5", "vit-gpt2"]
SHORT: dict[str, Any] = {"max_new_tokens": 12}
QUESTIONS = ("the red cup", "the cup")


def seen(session: Session) -> list[int]:
    """Pictures that the vision tower sees from here on, by its runs."""
    calls, encode = [], session._pictures.encode_in_parts

    def counted(decoder: Any, view: View) -> Any:
        calls.append(len(view.runs))
        return encode(decoder, view)

    session._pictures.encode_in_parts = counted  # type: ignore[method-assign]
    return calls


def brighter(levels: int, picture: np.ndarray = GREY) -> np.ndarray:
    return (picture.astype(np.int16) + levels).clip(0, 255).astype(np.uint8)


# --- by content ---


@pytest.mark.parametrize("name", FAMILIES)
def test_tower_sees_a_picture_once(tiny_bundle: Bundles, name: str) -> None:
    path = tiny_bundle(name).path
    with Session.load(path) as session, Session.load(path, picture_cache=0) as other:
        calls, wanted = seen(session), seen(other)
        for picture, reused in ((0, 0), (0, 1), (1, 0), (0, 1)):
            # Another object each time, in another form.
            image = PICTURES[picture].copy() if reused else Image.fromarray(PICTURES[picture])
            for question in QUESTIONS:
                found = session.generate(image, question, **SHORT)
                want = other.generate(image, question, **SHORT)
                assert found.tokens == want.tokens and found.lossy is None
                assert want.stats.reused_pictures == 0
                assert found.stats.reused_pictures == (reused or question != QUESTIONS[0])
                assert found.stats.to_dict()["similar_pictures"] == 0
        assert len(calls) == 2 and len(wanted) == 8


def test_picture_that_stands_twice_in_a_prompt_is_seen_once(tiny_bundle: Bundles) -> None:
    with (
        Session.load(tiny_bundle("qwen2.5-vl").path) as session,
        Session.load(session.bundle.path, picture_cache=0) as other,
    ):
        calls = seen(session)
        images = [PICTURES[0], PICTURES[1], PICTURES[0].copy()]
        found = session.generate(images, "the cup", **SHORT)
        assert found.tokens == other.generate(images, "the cup", **SHORT).tokens
        assert len(calls) == 2 and found.stats.reused_pictures == 1


def test_videos_are_kept_too(tiny_bundle: Bundles) -> None:
    frames = [np.roll(PICTURES[2], step, 0) for step in range(4)]
    with Session.load(tiny_bundle("qwen2.5-vl").path) as session:
        calls = seen(session)
        first, again = (
            session.generate(None, "the cup", video=Video(frames, fps=2.0), **SHORT) for _ in range(2)
        )
        assert again.tokens == first.tokens and len(calls) == 1 and again.stats.reused_pictures == 1
        frames[3] = brighter(1, frames[3])
        session.generate(None, "the cup", video=Video(frames, fps=2.0), similar=255.0, **SHORT)
        assert len(calls) == 2, "no video stands for another"


def test_encode_batches_and_conversations_use_what_is_kept(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("qwen2.5-vl").path, max_batch=2) as session:
        calls = seen(session)
        handle = session.encode(PICTURES[0])
        assert session.encode(PICTURES[0]).encoded is handle.encoded and calls == [1]
        asked = {"prompt": "the red cup", **SHORT}
        found = session.generate_batch([{"image": PICTURES[at], **asked} for at in (0, 1, 0, 1, 1)])
        assert [result.stats.reused_pictures for result in found] == [1, 0, 1, 1, 1]
        assert session.generate(PICTURES[1], **asked).tokens == found[1].tokens
        assert session.chat().say("the cup", PICTURES[1], **SHORT).stats.reused_pictures == 1
        assert calls == [1, 1]


def test_kept_embeddings_cannot_be_written(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("llava").path) as session:
        want = session.generate(PICTURES[0], "the red cup", **SHORT).tokens
        handle = session.encode(PICTURES[0])
        assert handle.encoded is not None
        before = handle.encoded.copy()
        with pytest.raises(ValueError, match="read-only"):
            handle.encoded[:] = 0
        for picture in PICTURES[1:]:
            session.generate(picture, "the red cup", **SHORT)
        np.testing.assert_array_equal(handle.encoded, before)
        assert session.generate(PICTURES[0], "the red cup", **SHORT).tokens == want


class Tower:
    """Gives each picture `rows` rows of 4 numbers."""

    def __init__(self, rows: int = 4):
        self.rows, self.calls = rows, 0
        self.manifest = self
        self.model, self.fingerprint = self, "tower"

    def image_embeds(self, runs: Any) -> np.ndarray:
        self.calls += 1
        return np.full((self.rows, 4), float(runs[0]["number"]), np.float32)


def view(number: int, levels: int | None = None) -> View:
    picture = None if levels is None else Image.fromarray(brighter(levels))
    return View("image", 4, lambda: ({"number": np.array(number)},), picture=picture)


def test_kept_bytes_are_bounded_and_the_least_used_goes_first() -> None:
    tower, cache = Tower(), PictureCache(3 * 64)

    def known(number: int) -> bool:
        return cache.recall(view(number)).encoded is not None

    for number in range(3):
        cache.encoded_view(tower, view(number))  # type: ignore[arg-type]
    assert cache.nbytes == 3 * 64 and known(0)
    cache.encoded_view(tower, view(3))  # type: ignore[arg-type]
    assert [known(number) for number in range(4)] == [True, False, True, True] and cache.nbytes == 3 * 64
    tower.rows = 100
    rows = np.concatenate([embeds_of(cache.encoded_view(tower, view(4))) for _ in range(2)])  # type: ignore[arg-type]
    assert rows.shape == (200, 4) and (rows == 4).all()
    assert not known(4) and known(0) and cache.nbytes == 3 * 64, "too large to keep, and nothing left for it"
    assert cache.encoded == tower.calls == 6


def test_thumbnails_count_as_bytes() -> None:
    tower, cache = Tower(), PictureCache(2 * (64 + 32 * 32 * 3))
    for number in range(3):
        cache.encoded_view(tower, cache.recall(view(number, 40 * number), similar=1.0))  # type: ignore[arg-type]
    assert cache.nbytes == cache.max_bytes
    assert cache.recall(view(0, 0), similar=1.0).encoded is None
    later = PictureCache(1 << 20)  # one that was kept before anybody compared
    later.encoded_view(tower, view(5, 10))  # type: ignore[arg-type]
    assert later.nbytes == 64
    for _ in range(2):
        assert later.recall(view(5, 10), similar=1.0).encoded is not None
        assert later.nbytes == 64 + 32 * 32 * 3


def test_session_without_a_picture_cache(tiny_bundle: Bundles) -> None:
    path = tiny_bundle("llava").path
    with Session.load(path, picture_cache=0) as session:
        calls = seen(session)
        for _ in range(2):
            assert session.generate(PICTURES[0], "the cup", **SHORT).stats.reused_pictures == 0
        assert len(calls) == 2
        for ask in (
            lambda: session.generate(PICTURES[0], "the cup", similar=1.0),
            lambda: session.encode(PICTURES[0], similar=1.0),
            lambda: session.generate_batch([{"image": PICTURES[0], "similar": 1.0}]),
        ):
            with pytest.raises(OptionError, match=r"similar: 1 .*picture_cache above 0"):
                ask()
        assert len(calls) == 2
    for wrong in (-1, 0.5, "64", None, True):
        with pytest.raises(OptionError, match="picture_cache"):
            Session.load(path, picture_cache=wrong)  # type: ignore[arg-type]


# --- prompts that begin with the same picture ---


@pytest.mark.parametrize("draft", ["none", "medusa", "eagle", "vispec", "imitation", "prompt-lookup"])
def test_another_question_computes_only_what_is_behind_the_picture(tiny_bundle: Bundles, draft: str) -> None:
    path = tiny_bundle("qwen2.5-vl").path
    with Session.load(path) as session, Session.load(path, picture_cache=0) as other:
        calls, asked = seen(session), {"draft": draft, "max_new_tokens": 12}
        for at, question in enumerate(("the red cup", "cup", "the table the cup", "cup")):
            turns = (("system", []), ("user", [{"type": "image"}]))
            messages = [
                {"role": role, "content": [*parts, {"type": "text", "text": text}]}
                for (role, parts), text in zip(turns, ("the table", question), strict=True)
            ]
            found = session.generate(PICTURES[0], messages=messages, reuse_prompt=True, **asked)
            want = other.generate(PICTURES[0], messages=messages, max_new_tokens=12, draft="none")
            assert found.tokens == want.tokens
            if at:
                assert found.stats.reused_pictures == 1
                assert found.stats.reused_tokens > found.stats.prompt_tokens // 2
        assert calls == [1]


def test_pixels_of_a_picture_within_the_kept_prompt_are_only_compared(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("qwen2.5-vl").path, picture_cache=0) as session:
        calls, family = seen(session), session._family
        made: list[View] = []

        class Watched:
            name = family.name

            def view(self, bundle: Any, image: Any) -> View:
                made.append(family.view(bundle, image))
                return made[-1]

            def prepare(self, bundle: Any, image: Any, prompt: Any) -> Any:
                return family.prepare(bundle, [self.view(bundle, each) for each in image], prompt)

        session._family = Watched()
        for question in QUESTIONS:
            found = session.generate(PICTURES[0], question, reuse_prompt=True, **SHORT)
        assert found.stats.reused_pictures == 1 and calls == [1]
        assert ["runs" in view.__dict__ for view in made] == [True, False], "not resized, not normalized"


@pytest.mark.parametrize("name", CROSSING)
@pytest.mark.parametrize("draft", ["none", "medusa", "imitation"])
def test_encoder_output_of_the_same_prompt_is_kept(tiny_bundle: Bundles, name: str, draft: str) -> None:
    tiny = tiny_bundle(name)
    if draft != "none" and tiny.bundle.manifest.choose_draft(draft) is None:
        pytest.skip(f"{name} has no {draft}")
    with Session.load(tiny.path) as session, Session.load(tiny.path, picture_cache=0) as other:
        runs, run = [], session.decoder.encode
        session.decoder.encode = lambda *given: runs.append(1) or run(*given)  # type: ignore[method-assign]

        def ask(image: Any, prompt: str, kept: bool, **options: Any) -> None:
            before = len(runs)
            options = {"reuse_prompt": True, "max_new_tokens": 12, **options}
            found = session.generate(image, prompt, draft=draft, **options)
            want = other.generate(image, prompt, draft="none", max_new_tokens=options["max_new_tokens"])
            assert found.tokens == want.tokens
            assert len(runs) - before == (not kept)
            assert found.stats.reused_tokens == (found.stats.prompt_tokens if kept else 0)

        sees = tiny.bundle.manifest.image is not None
        first, second = (PICTURES[0], PICTURES[1]) if sees else (None, None)
        ask(first, "the red cup", kept=False)
        ask(first, "the red cup", kept=True)
        ask(first, "the red cup", kept=True, max_new_tokens=40)
        # ViT-GPT2's prompt is its decoder's: the picture alone is encoded.
        ask(first, "the cup", kept=name == "vit-gpt2")
        if sees:
            ask(second, "the cup", kept=False)
            ask(first, "the cup", kept=False)
        ask(first, "the cup", kept=True)
        ask(first, "the cup", kept=False, reuse_prompt=False)
        ask(first, "the cup", kept=False)
        session.generate_batch([{"image": second, "prompt": "the cup", "max_new_tokens": 2}])
        ask(first, "the cup", kept=False)


# --- pictures that nearly did not change ---


@pytest.mark.parametrize("name", ["qwen2.5-vl", "blip2-opt", "vit-gpt2"])
def test_similar_picture_is_replaced_and_marked(tiny_bundle: Bundles, name: str) -> None:
    with Session.load(tiny_bundle(name).path) as session:
        calls, asked = seen(session), {"prompt": "the cup", "similar": 2.0, **SHORT}
        first = session.generate(GREY, **asked)
        assert first.lossy is None and first.stats.similar_pictures == 0
        within, above = session.generate(brighter(2), **asked), session.generate(brighter(3), **asked)
        assert within.tokens == first.tokens and len(calls) == 2
        assert (within.lossy, within.stats.similar_pictures, within.stats.reused_pictures) == (
            "similar",
            1,
            1,
        )
        assert within.to_dict()["lossy"] == "similar" and within.to_dict()["stats"]["similar_pictures"] == 1
        assert (above.lossy, above.stats.similar_pictures, above.stats.reused_pictures) == (None, 0, 0)
        again = session.generate(GREY, **asked)
        assert again.lossy is None and again.tokens == first.tokens, "the same, not a similar one"
        assert session.generate(brighter(2), "the cup", **SHORT).lossy is None, "only where it is asked for"
        assert len(calls) == 3
        other = session.generate(PICTURES[1], **asked)
        assert other.lossy is None and len(calls) == 4


def test_a_slow_change_is_seen(tiny_bundle: Bundles) -> None:
    """Every picture stands no further from what was encoded than the threshold, however small its steps are."""
    with Session.load(tiny_bundle("llava").path) as session:
        calls = seen(session)
        replaced = [
            session.generate(brighter(level), "cup", similar=2.5, max_new_tokens=1).stats.similar_pictures
            for level in range(9)
        ]
        assert replaced == [0, 1, 1, 0, 1, 1, 0, 1, 1] and len(calls) == 3


def test_most_similar_picture_of_the_same_size_stands_for_another() -> None:
    tower, cache = Tower(), PictureCache(1 << 20)
    for number, levels in ((1, 0), (2, 10), (3, 20)):
        cache.encode(tower, cache.recall(view(number, levels), similar=0.0))  # type: ignore[arg-type]
    found = cache.recall(view(9, 12), similar=15.0)
    assert found.similar and found.encoded is not None and found.encoded[0, 0] == 2
    assert not cache.recall(view(9, 10), similar=15.0).similar
    other = View("image", 5, lambda: (), picture=Image.fromarray(brighter(10)))
    assert cache.recall(other, similar=255.0) is other, "of another number of embeddings"


def test_picture_kept_without_a_thumbnail_gets_one() -> None:
    tower, cache = Tower(), PictureCache(1 << 20)
    cache.encode(tower, view(1, 0))  # type: ignore[arg-type]
    assert cache.recall(view(9, 1), similar=5.0).encoded is None
    assert cache.recall(view(1, 0), similar=5.0).encoded is not None
    assert cache.recall(view(9, 1), similar=5.0).similar


def test_difference_is_that_of_the_part_that_changed_most() -> None:
    one = np.full((32, 32, 3), 50, np.uint8)
    other = one.copy()
    other[4:8, 28:32] = 20
    assert difference(one, other) == difference(other, one) == 30 and difference(one, one) == 0
    other[5, 30] = 50
    assert difference(one, other) == pytest.approx(30 * 15 / 16)


def test_prompt_behind_a_similar_picture_is_kept(tiny_bundle: Bundles) -> None:
    for name in ("qwen2.5-vl", "vit-gpt2"):
        with Session.load(tiny_bundle(name).path) as session:
            asked = {"prompt": "the cup", "similar": 2.0, "reuse_prompt": True, **SHORT}
            first, second = session.generate(GREY, **asked), session.generate(brighter(1), **asked)
            assert second.stats.reused_tokens >= second.stats.prompt_tokens - 1 and second.lossy == "similar"
            assert second.tokens == first.tokens
            assert session.generate(brighter(9), **asked).stats.reused_tokens < second.stats.reused_tokens


def test_conversations_streams_and_batches_mark_similar_pictures(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("qwen2.5-vl").path, max_batch=2) as session:
        calls, chat = seen(session), session.chat()
        assert chat.say("cup", GREY, similar=2.0, max_new_tokens=2).lossy is None
        assert chat.say("the cup", brighter(1), similar=2.0, max_new_tokens=2).lossy == "similar"
        assert chat.say("red", max_new_tokens=2).lossy == "similar", "it is still in the prompt"
        assert (
            session.encode(brighter(2), similar=2.0).similar and not session.encode(GREY, similar=2.0).similar
        )
        asked = {"prompt": "the cup", "similar": 2.0, **SHORT}
        stream = session.stream(brighter(1), **asked)
        assert stream.lossy is None
        list(stream)
        assert stream.lossy == stream.result.lossy == "similar"
        found = session.generate_batch(
            [{"image": each, **asked} for each in (GREY, brighter(1), brighter(2))]
        )
        assert [result.lossy for result in found] == [None, "similar", "similar"]
        drawn = session.generate(
            brighter(1), temperature=0.9, seed=1, lossy="typical", draft="medusa", **asked
        )
        assert drawn.lossy == "similar, typical"
        assert Stats.total([found[0].stats, found[1].stats, drawn.stats]).lossy == "similar, typical"
        assert Stats.total(result.stats for result in found).similar_pictures == 2
        assert len(calls) == 1


@pytest.mark.parametrize("wrong", [-1, 256, "1", True, float("nan")])
def test_similar_is_a_difference(tiny_bundle: Bundles, wrong: Any) -> None:
    with Session.load(tiny_bundle("llava").path) as session, pytest.raises(OptionError, match="similar"):
        session.encode(GREY, similar=wrong)


def test_run_marks_similar_pictures_of_a_folder(
    tiny_bundle: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, levels in enumerate((0, 1, 50)):
        Image.fromarray(brighter(levels)).save(tmp_path / f"{number}.png")
    bundle = str(tiny_bundle("llava").path)
    words = [
        "run", bundle, "--image", str(tmp_path), "--prompt", "cup", "--similar", "2", "--max-new-tokens", "4"
    ]  # fmt: skip
    assert main([*words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["lossy"] for each in found] == [None, "similar", None]
    assert [each["stats"]["similar_pictures"] for each in found] == [0, 1, 0]
    assert main([*words, "--draft", "none"]) == 0
    said = capsys.readouterr().err
    assert (
        said.count("LOSSY (a similar picture)") == 1 and "1.png: " in said and "1 picture seen before" in said
    )
