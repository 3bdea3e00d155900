"""Messages: every text of a conversation is laid out, in order, or the request is refused by the line that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import ImageError, PromptError
from vlmexport.runtime.families import get_family
from vlmexport.runtime.families.chat import Medium, media_ids, special_tokens
from vlmexport.runtime.families.parts import gather_media
from vlmexport.runtime.images.video import Video
from vlmexport.runtime.text.chat import render_chat
from vlmexport.runtime.text.messages import check_messages, check_written, readable, texts

from tests.support import handmade_bundle

OPEN = "{% if add_generation_prompt %}assistant:{% endif %}"
TEMPLATES = {
    "text": "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}",
    "trimmed text": "{% for m in messages %}{{ m.role + ':' + m.content.strip() + ';' }}{% endfor %}",
    "parts": (  # as LLaVA-1.5 publishes it
        "{% for m in messages %}{{ m.role }}:{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
        "{{ p.text }} {% endfor %};{% endfor %}"
    ),
    "both": (
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
    ),
    "as it is": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",  # of a list: what Python writes
    "as JSON": "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string else m.content | tojson }};{% endfor %}",
    "first part": "{% for m in messages %}{{ m.role }}:{{ m.content[0]['text'] }};{% endfor %}",
    "no system": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.role + ':' + m.content }};{% endfor %}"
    ),
    "system last": (
        "{% for m in messages if m.role != 'system' %}{{ m.role }}:{% if loop.last %}"
        "{% for s in messages if s.role == 'system' %}({{ s.content }}){% endfor %}{% endif %}{{ m.content }};{% endfor %}"
    ),
    "user and assistant": (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% elif m.role == 'assistant' %}"
        "{{ m.content }};{% endif %}{% endfor %}"
    ),
    "reasoning left out": (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    ),
}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def laid(template: str, messages: list[Any]) -> str:
    turns = readable(template, check_messages(messages), {})
    rendered = render_chat(template, turns)
    check_written(rendered, turns)
    return rendered


WORDS = st.text(alphabet="ab <>'\"\n€", min_size=1, max_size=8).filter(str.strip)
CONTENTS = st.one_of(
    WORDS, st.lists(WORDS, min_size=1, max_size=3).map(lambda words: [part(w) for w in words])
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_text_is_written_in_order_or_refused(name: str, data: st.DataObject) -> None:
    roles = data.draw(
        st.lists(st.sampled_from(["user", "assistant", "system", "tool"]), min_size=1, max_size=4)
    )
    messages = [{"role": role, "content": data.draw(CONTENTS)} for role in roles]
    try:
        rendered = laid(TEMPLATES[name], messages)
    except PromptError as error:
        assert "\n" not in str(error)
        plain = all(role in ("user", "assistant") for role in roles)
        assert not plain or (name == "first part" and any(len(m["content"]) > 1 for m in messages)), error
        return
    assert "'text'" not in rendered.replace(str(messages), "") or "'text'" in str(
        [m["content"] for m in messages]
    )
    at = 0
    for text in texts(messages):
        if text.role == "system":
            assert text.text.strip() in rendered
            continue
        at = rendered.find(text.text.strip(), at)
        assert at >= 0, (text, rendered)
        at += len(text.text.strip())


@pytest.mark.parametrize(
    ("template", "content", "wanted"),
    [
        ("text", "a", "user:a;"),
        ("text", [part("a"), part("b")], "user:a\nb;"),
        ("parts", "a", "user:a ;"),
        ("parts", [part("a"), part("b")], "user:a b ;"),
        ("both", "a", "user:a;"),
        ("both", [part("a"), part("b")], "user:ab;"),
        ("as it is", [part("a")], "user:a;"),
        ("as JSON", [part("a")], "user:a;"),
        ("first part", "a", "user:a;"),
        ("first part", [part("a")], "user:a;"),
        ("trimmed text", " a\n", "user:a;"),
    ],
)
def test_message_form_follows_the_template(template: str, content: Any, wanted: str) -> None:
    assert laid(TEMPLATES[template], [{"role": "user", "content": content}]) == wanted


TALK = [("system", "Be short."), ("user", "one"), ("assistant", "two"), ("user", "three")]


def talk(*turns: tuple[str, str], **fields: Any) -> list[Any]:
    return [{"role": role, "content": words, **fields} for role, words in turns]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (TEMPLATES["user and assistant"], talk(*TALK), r"does not write message 0 \(role 'system'\): 'Be short\.'"),
        (TEMPLATES["user and assistant"], talk(("tool", "7"), *TALK[1:]), r"message 0 \(role 'tool'\)"),
        (TEMPLATES["no system"], talk(*TALK), "refuses these messages: no system"),
        (TEMPLATES["first part"], [{"role": "user", "content": [part("a"), part("b")]}], "write message 0, part 1"),
        ("{{ messages[-1].content }}", talk(*TALK), r"does not write message 0 \(role 'system'\)"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", talk(*TALK), "message 0 of role 'system' as if its role were 'user'"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", talk(*TALK[1:]), "message 1 of role 'assistant' as if its role were 'user'"),
        ("{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{% endfor %}", talk(*TALK), "'system' as if its role were 'assistant'"),
        ("{% for m in messages | reverse %}{{ m.role + m.content }}{% endfor %}", talk(*TALK[1:]), "does not write message"),
        ("{% for m in messages %}{{ m.role + (m.content | replace('n', '')) }}{% endfor %}", talk(("user", "one")), "write message 0 .*'one'"),
        (TEMPLATES["text"], talk(("user", "one"), tool_calls=[1]), "message 0: .* does not read its field 'tool_calls'"),
        (TEMPLATES["text"], talk(("user", "one"), name=object()), "message 0: its field 'name' is not data"),
        (TEMPLATES["text"], [{"role": "user", "content": None}], "message 0: its content is NoneType"),
        (TEMPLATES["both"], [{"role": "user", "content": ["a"]}], r'message 0, part 0 has no type \(text\); write {"type": "text"'),
        (TEMPLATES["both"], [{"role": "user", "content": [{"text": "a"}]}], 'has no type .*write {"type": "text"'),
        (TEMPLATES["both"], [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "'input_text' is not known .*\"text\": TEXT"),
        (TEMPLATES["both"], [{"role": "user", "content": [{"type": "input_audio"}]}], "'input_audio' is not known .*leave it out"),
        (TEMPLATES["both"], [{"role": "user", "content": [{"type": "image"}]}], "reads no images: leave it out"),
        (TEMPLATES["both"], [{"role": "user", "content": [{"type": "text"}]}], "part 0: its text is NoneType"),
        (TEMPLATES["both"], [{"role": "user", "content": [part("a") | {"cache_control": {}}]}], "'cache_control' of a part"),
    ],
)  # fmt: skip
def test_text_dropped_by_the_template_is_refused(template: str, messages: list[Any], message: str) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        laid(template, messages)
    assert "\n" not in str(caught.value)


def test_answers_may_lose_their_reasoning_and_fields_may_be_read() -> None:
    reasoned = talk(("user", "one"), ("assistant", "<think>so</think>two"), ("user", "three"))
    assert laid(TEMPLATES["reasoning left out"], reasoned) == "user:one;assistant:two;user:three;"
    named = "{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name }}:{{ m.content }};{% endfor %}"
    assert laid(named, talk(("user", "one"), name="Ada")) == "user Ada:one;"
    assert laid(named, [{"role": "user", "content": "one", "name": None}]) == "user:one;"
    assert list(check_messages([{"name": "Ada", "content": "one", "role": "user"}])[0]) == [
        "name",
        "content",
        "role",
    ]


@pytest.mark.parametrize(
    ("kind", "kinds", "message"),
    [
        ("image_url", ("image",), r'\(text, image\); write {"type": "image", "image": PICTURE}'),
        (
            "input_image",
            ("image", "video"),
            r'\(text, image, video\); write {"type": "image", "image": PICTURE}',
        ),
        ("video_url", ("image", "video"), 'write {"type": "video", "video": VIDEO}'),
        ("video", ("image",), "this model reads no videos: leave it out"),
        ("audio", ("image",), "'audio' is not known .*; leave it out"),
        (3, ("image",), "its type 3 is not known"),
        (["image"], ("image",), "is not known"),
    ],
)
def test_parts_of_unknown_types_are_refused(kind: Any, kinds: tuple[str, ...], message: str) -> None:
    with pytest.raises(PromptError, match=f"message 0, part 1.*{message}"):
        check_messages([{"role": "user", "content": [part("a"), {"type": kind}]}], kinds)


# --- what parts hold ---

FRAMES = [object(), object()]


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([{"type": "image", "image": "a.png"}], ["a.png"]),
        (
            [{"type": "image", "path": "a.png"}, part("x"), {"type": "image", "url": "b.png"}],
            ["a.png", "b.png"],
        ),
        ([{"type": "image", "image": None}], []),
        ([{"type": "video", "video": FRAMES}], [Video(FRAMES)]),
        ([{"type": "video", "path": Video("v.mp4", 5.0)}, {"type": "image"}], [Video("v.mp4", 5.0)]),
        ([part("image")], []),
    ],
)
def test_media_in_parts_equal_media_beside_messages(parts: list[Any], found: list[Any]) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    media, turns = gather_media([], messages)
    assert media == found
    assert isinstance(turns, list) and turns[0] == messages[0]
    assert [p["type"] for p in turns[1]["content"]] == [p["type"] for p in parts]
    assert gather_media(media, turns) == (media, turns)
    assert messages[1]["content"] is parts, "the caller's messages are as before"
    assert check_messages(turns, ("image", "video")) == turns


def test_media_given_twice_are_refused() -> None:
    held = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    with pytest.raises(PromptError, match="message 0, part 0: its image is given in the part, and 1 beside"):
        gather_media(["b.png"], held)
    twice = [{"role": "user", "content": [{"type": "image", "image": "a.png", "url": "b.png"}]}]
    with pytest.raises(PromptError, match="message 0, part 0: its image is given twice, as image and as url"):
        gather_media([], twice)
    asked = [{"role": "user", "content": [{"type": "image", "image": "a.png", "max_pixels": 3}]}]
    with pytest.raises(
        PromptError, match="message 0, part 0: 'max_pixels' of a part of type 'image' is not read"
    ):
        check_messages(gather_media([], asked)[1], ("image",))  # type: ignore[arg-type]
    assert gather_media(["b.png"], "text") == (["b.png"], "text")
    assert gather_media([], [3, {"role": "user"}]) == ([], [3, {"role": "user"}])


USERS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif m.role == 'user' %}<|im_start|>{% endif %}{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "count", "message"),
    [
        (["user", "assistant"], 2, r"writes 1 <\|im_start\|> for 2 parts of type 'image' \(message 0, part 1; message 1, part 1\)"),
        (["user", "user"], 1, r"the prompt has 2 <\|im_start\|>, and 1 pictures were given"),
        (["user", "user"], 2, None),
    ],
)  # fmt: skip
def test_every_picture_is_written(llama: Bundle, roles: list[str], count: int, message: str | None) -> None:
    llama.manifest.text.chat_template = USERS
    media = {"image": Medium("<|im_start|>", "", "pictures")}
    messages = [{"role": role, "content": [part("a"), {"type": "image"}]} for role in roles]
    if message is None:
        media_ids(llama, messages, ["image"] * count, media)
        return
    with pytest.raises(PromptError, match=message):
        media_ids(llama, messages, ["image"] * count, media)


# --- special tokens ---

NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token", "image_token", "additional_special_tokens")  # fmt: skip
SHOWN = "".join(f"({{{{ {name} }}}}{{{{ 'none' if {name} is not defined }}}})" for name in NAMES)


@pytest.fixture
def llama(tmp_path: Path) -> Bundle:
    return Bundle.open(handmade_bundle.write_bundle(tmp_path / "llama", "llama", chat_template="".join(f"{{{{ {name} }}}}" for name in NAMES) + TEMPLATES["both"]))  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(names=st.sets(st.sampled_from(NAMES[:8])))
def test_a_template_is_given_the_tokenizers_own_special_tokens(names: set[str]) -> None:
    transformers = pytest.importorskip("transformers")
    given_ = {name: f"<{name[:3]}>" for name in sorted(names)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=handmade_bundle.byte_level_tokenizer(), chat_template=SHOWN, **given_
    )
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.special_tokens_map == given_
    assert render_chat(SHOWN, messages, given_) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_special_tokens_of_a_bundle(llama: Bundle) -> None:
    text = llama.manifest.text
    written = {"bos_token": llama.tokenizer.token(text.bos_token_id), "eos_token": llama.tokenizer.token(text.eos_token_ids[0])}  # fmt: skip
    assert special_tokens(llama) == {name: token for name, token in written.items() if token is not None}
    for given_ in ({}, {"eos_token": "</s>", "image_token": "<image>"}):
        llama.manifest = replace(llama.manifest, text=replace(text, special_tokens=given_))
        assert special_tokens(llama) == given_
        ids = get_family("llama").prepare(llama, None, "hello").token_ids
        shown = "".join(given_.get(name, "") for name in NAMES)
        assert llama.tokenizer.decode(ids, skip_special_tokens=False) == f"{shown}user:hello;"


def test_text_model_refuses_media_parts(llama: Bundle) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, part("x")]}]
    with pytest.raises(ImageError, match="reads text only"):
        get_family("llama").prepare(llama, None, messages)
