"""Conversations, prompts that begin like the one before, and pictures that were encoded once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import ImageError, OptionError, PromptError, VlmexportError
from vlmexport.runtime.families.base import Prepared, View
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.session.inputs import RequestInputs
from vlmexport.runtime.session.prefix_cache import common_length, snapshot
from vlmexport.runtime.session.request_options import RequestOptions

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

Bundles = Callable[[str], "TinyBundle"]
PICTURES = [Image.fromarray(synthetic_image(*size)) for size in ((50, 70), (150, 60), (64, 64))]
WORDS = ("the red cup", "cup", "red")


@pytest.fixture(params=["qwen2.5-vl", "llava", "llava-next", "internvl", "smolvlm", "llama"])
def tiny(request: pytest.FixtureRequest, tiny_bundle: Bundles) -> TinyBundle:
    return tiny_bundle(request.param)


def seen(session: Session) -> list[int]:
    """Pictures that the tower sees from here on, by its runs."""
    calls, encode = [], session._pictures.encode_in_parts

    def counted(decoder: Any, view: View) -> Any:
        calls.append(len(view.runs))
        return encode(decoder, view)

    session._pictures.encode_in_parts = counted  # type: ignore[method-assign]
    return calls


def test_later_turn_computes_only_new_tokens(tiny: TinyBundle) -> None:
    sees = tiny.bundle.manifest.image is not None
    with Session.load(tiny.path) as session, Session.load(tiny.path) as other:
        chat, calls = session.chat("the table"), seen(session)
        for at, words in enumerate(WORDS):
            image = PICTURES[at] if sees and at < 2 else None
            before = len(chat.messages)
            found = chat.say(words, image, max_new_tokens=3)
            want = other.generate(
                images=PICTURES[: min(at + 1, 2)] if sees else None,
                messages=chat.messages[: before + 1],
                max_new_tokens=3,
            )
            assert found.tokens == want.tokens and want.stats.reused_tokens == 0
            assert found.stats.prompt_tokens == want.stats.prompt_tokens
            if at:
                fresh = found.stats.prompt_tokens - found.stats.reused_tokens
                assert 0 < fresh < found.stats.reused_tokens, "most of the prompt was there"
        assert len(calls) == (2 if sees else 0), "the tower saw each picture once"
        assert [turn["role"] for turn in chat.messages] == ["system", *["user", "assistant"] * 3]


@pytest.mark.parametrize(
    "draft", ["none", "imitation", "imitation@2", "medusa", "eagle", "vispec", "prompt-lookup"]
)
def test_later_turn_has_the_same_answer_with_every_draft(tiny_bundle: Bundles, draft: str) -> None:
    tiny = tiny_bundle("qwen2.5-vl-two-cuts" if draft == "imitation@2" else "qwen2.5-vl")
    with Session.load(tiny.path) as session, Session.load(tiny.path) as other:
        chat = session.chat()
        for words, most in zip(WORDS, (3, 3, 24), strict=True):
            picture = PICTURES[0] if words == WORDS[1] else None
            found = chat.say(words, picture, max_new_tokens=most, draft=draft)
            images = [PICTURES[0]] if words != WORDS[0] else []
            want = other.generate(images, chat.messages[:-1], max_new_tokens=most, draft="none")
            assert found.tokens == want.tokens


def test_request_between_turns_only_drops_the_cache(tiny_bundle: Bundles) -> None:
    tiny = tiny_bundle("qwen2.5-vl")
    with Session.load(tiny.path) as session, Session.load(tiny.path) as other:
        chat = session.chat()
        chat.say(WORDS[0], PICTURES[0], max_new_tokens=3)
        session.generate(PICTURES[1], "the table", max_new_tokens=3)
        found = chat.say(WORDS[1], max_new_tokens=3)
        assert found.stats.reused_tokens == 0
        want = other.generate(PICTURES[0], chat.messages[:-1], max_new_tokens=3)
        assert found.tokens == want.tokens
        assert chat.say(WORDS[2], max_new_tokens=3).stats.reused_tokens > 0, "and is kept again"


def test_only_requests_that_ask_for_it_reuse_a_prompt(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("qwen2.5-vl").path) as session:

        def reused(picture: Any, **options: Any) -> int:
            found = session.generate(picture, "the red cup", max_new_tokens=4, **options)
            return found.stats.reused_tokens

        assert reused(PICTURES[0], reuse_prompt=True) == 0
        assert reused(PICTURES[0]) == 0
        assert reused(PICTURES[0], reuse_prompt=True) == 0, "the request between did not leave its rows"
        whole = session.generate(PICTURES[0], "the red cup", max_new_tokens=4, reuse_prompt=True).stats
        assert whole.reused_tokens == whole.prompt_tokens - 1
        first = np.flatnonzero(
            np.array(
                session._prepare(RequestInputs([PICTURES[0]], "the red cup"), RequestOptions()).token_ids
            )
            == session.bundle.manifest.text.image_token_id
        )[0]
        assert reused(PICTURES[1], reuse_prompt=True) == first, "up to the picture, which is another"
        with pytest.raises(OptionError, match="reuse_prompt"):
            reused(None, reuse_prompt=1)


@pytest.mark.parametrize(
    ("bundle", "draft"), [("qwen2.5-vl", "imitation"), ("qwen2.5-vl-two-cuts", "imitation@2")]
)
def test_reused_cache_equals_a_prefill(tiny_bundle: Bundles, bundle: str, draft: str) -> None:
    """Those of a draft with attention, too, which passes the rows behind the kept ones only."""
    tiny = tiny_bundle(bundle)
    with Session.load(tiny.path) as session, Session.load(tiny.path) as other:
        chat = session.chat()
        chat.say(WORDS[0], PICTURES[0], max_new_tokens=6, draft=draft)
        found = chat.say(WORDS[1], max_new_tokens=2, draft=draft)
        other.generate(PICTURES[0], chat.messages[:-1], max_new_tokens=2, draft=draft)
        assert found.stats.reused_tokens > 0
        manifest = tiny.bundle.manifest
        assert len(session.decoder.arena.layers) == manifest.decoder.num_layers + len(manifest.attending)
        for layer in range(len(session.decoder.arena.layers)):
            here, there = (each.decoder.arena.read(layer) for each in (session, other))
            for part in ("key", "value"):
                np.testing.assert_allclose(here[part], there[part], atol=1e-4)


def test_failed_turn_is_not_part_of_the_conversation(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("qwen2.5-vl").path) as session:
        chat = session.chat()
        first = chat.say(WORDS[0], max_new_tokens=4)
        for bad, error in (("cup " * 3000, PromptError), (b"cup", PromptError)):
            with pytest.raises(error):
                chat.say(bad, PICTURES[0])  # type: ignore[arg-type]
        with pytest.raises(ImageError):
            chat.say("cup", "nowhere.png")
        with pytest.raises(OptionError, match="reuse_prompt: a conversation always does"):
            chat.say("cup", reuse_prompt=False)
        assert len(chat.messages) == 2 and chat.messages[-1]["content"][0]["text"] == first.text
        assert chat.say(WORDS[1], max_new_tokens=4).stats.reused_tokens > 0


def test_conversation_needs_a_chat_template(tiny_bundle: Bundles) -> None:
    with (
        Session.load(tiny_bundle("t5").path) as session,
        pytest.raises(PromptError, match="no chat template"),
    ):
        session.chat().say("cup", PICTURES[0])


# --- pictures that were encoded once ---


@pytest.mark.parametrize(
    "name", ["qwen2.5-vl", "llava", "llava-next", "internvl", "smolvlm", "t5", "blip2-opt", "vit-gpt2"]
)
def test_encoded_picture_replaces_the_picture(tiny_bundle: Bundles, name: str) -> None:
    with Session.load(tiny_bundle(name).path, max_batch=2, picture_cache=0) as session:
        want = session.generate(PICTURES[0], "the red cup", max_new_tokens=16)
        calls = seen(session)
        handle = session.encode(PICTURES[0])
        assert handle.encoded is not None and handle.encoded.shape[0] == handle.num_embeds and not handle.runs
        for _ in range(2):
            assert session.generate(handle, "the red cup", max_new_tokens=16).tokens == want.tokens
        together = session.generate_batch(
            [{"image": handle, "prompt": "the red cup", "max_new_tokens": 16}] * 3
        )
        assert [result.tokens for result in together] == [want.tokens] * 3
        assert len(calls) == 1
        again = session.encode(np.asarray(PICTURES[0])[..., ::-1], channels="bgr")
        np.testing.assert_array_equal(again.encoded, handle.encoded)
        assert again.digest == handle.digest


def test_encoded_picture_of_another_model_is_refused(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("llava").path) as session:
        handle = session.encode(PICTURES[0])
    other = tiny_bundle("qwen2.5-vl").path
    with Session.load(other) as session, pytest.raises(ImageError, match="another model's"):
        session.generate(handle, "the cup")
    with Session.load(tiny_bundle("llama").path) as session, pytest.raises(ImageError, match="text only"):
        session.encode(PICTURES[0])


def test_a_busy_session_encodes_nothing(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("llava").path) as session:
        stream = session.stream(PICTURES[0], "the red cup", max_new_tokens=16)
        next(stream)
        with pytest.raises(VlmexportError, match="busy"):
            session.encode(PICTURES[0])
        stream.close()
        found: list[View] = []
        worker = threading.Thread(target=lambda: found.append(session.encode(PICTURES[0])))
        worker.start()
        worker.join()
        assert found[0].encoded is not None


def test_aliases_given_together_are_refused(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("llava").path) as session:
        for words in ({"image": PICTURES[0], "images": PICTURES}, {"prompt": "cup", "messages": []}):
            with pytest.raises(OptionError, match="two words"):
                session.generate(**words)
            with pytest.raises(OptionError, match=r"requests\[0\].*two words"):
                session.generate_batch([words])


# --- how much two prompts share ---


def picture(number: int, rows: int, *, apart: bool = False) -> View:
    """`apart`: with text between its rows."""
    written = (1, *(piece for _ in range(rows - 1) for piece in ("text", 1))) if apart else None
    return View("image", rows, lambda: ({"pixel_values": np.full(1, number)},), written=written)


@st.composite
def prompts(draw: st.DrawFn) -> Prepared:
    """Text of two tokens, and pictures of few kinds between; token 9 stands for rows."""
    ids: list[int] = []
    slots: list[int] = []
    views: list[View] = []
    for _ in range(draw(st.integers(1, 4))):
        ids += draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        if draw(st.booleans()):
            views.append(picture(draw(st.integers(0, 1)), draw(st.integers(1, 3)), apart=draw(st.booleans())))
            for number, span in enumerate(views[-1].spans):
                ids += draw(st.lists(st.integers(0, 1), min_size=1, max_size=2)) if number else []
                slots += range(len(ids), len(ids) + span)
                ids += [9] * span
    ids += [0] * draw(st.integers(1, 2))
    positions = np.cumsum([1 if i != 9 else 2 for i in ids])[None] if draw(st.booleans()) else None
    return Prepared(np.array(ids, np.int64), tuple(views), np.array(slots) if views else None, positions)


def rows(prepared: Prepared, tokens: list[int]) -> list[tuple[Any, ...]]:
    """Everything that a row of the cache depends on by itself."""
    found, slots = [], [] if prepared.image_positions is None else prepared.image_positions.tolist()
    sources = [(view.digest, at) for view in prepared.views for at in range(view.num_embeds)]
    count = len(prepared.token_ids)
    top = None if prepared.positions is None else int(prepared.positions.max())
    for at, token in enumerate([*prepared.token_ids.tolist(), *tokens]):
        place = at if top is None else top + 1 + at - count if at >= count else int(prepared.positions[0, at])  # type: ignore[index]
        found.append((token, place, sources[slots.index(at)] if at in slots else None))
    return found


@settings(max_examples=400, deadline=None)
@given(prompts(), st.lists(st.integers(0, 1), max_size=4), prompts(), st.data())
def test_common_prefix_of_two_prompts(
    first: Prepared, tokens: list[int], second: Prepared, data: st.DataObject
) -> None:
    length = data.draw(st.integers(len(first.token_ids), len(first.token_ids) + len(tokens)))
    prefix = snapshot(first, tokens, length)
    if data.draw(st.booleans()):  # one that goes on with the other
        ids = np.concatenate([prefix.ids, second.token_ids])
        views = (*first.views, *second.views)
        slots = [] if first.image_positions is None else [first.image_positions]
        slots += [] if second.image_positions is None else [second.image_positions + length]
        positions = None
        if prefix.positions is not None:
            behind = prefix.positions.max() + 1 + np.arange(len(second.token_ids))
            positions = np.concatenate([prefix.positions, behind[None]], axis=1)
        second = Prepared(ids, views, np.concatenate(slots) if slots else None, positions)
    count = common_length(prefix, second)
    here, there = rows(first, tokens)[:length], rows(second, [])
    same = next(
        (at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there))
    )
    most = min(same, len(there) - 1)
    starts = [] if second.image_positions is None else second.image_positions.tolist()
    ends = np.cumsum([view.num_embeds for view in second.views]).tolist()
    whole = [
        (starts[end - view.num_embeds], starts[end - 1] + 1)
        for end, view in zip(ends, second.views, strict=True)
    ]
    for start, end in whole:  # no picture in part
        if start < most < end:
            most = start
    assert count == most
