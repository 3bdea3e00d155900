"""Bodies of a server's requests: what is read, what asks for nothing, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("msgspec")
from vlmexport.runtime.serving.http.answers import speculation_of, usage_of
from vlmexport.runtime.serving.http.errors import RequestError, error_of
from vlmexport.runtime.serving.http.requests import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    read_chat,
    read_completion,
)
from vlmexport.runtime.serving.http.translate import (
    Defaults,
    translate_chat,
    translate_completion,
)
from vlmexport.runtime.serving.messages import Counts, Failure, Loaded
from vlmexport.runtime.session.options import GenerateOptions

TALKING = Loaded("tiny", "sha256:0", True, 4, 100, None)
CAPTIONING = Loaded("tiny", "sha256:0", False, 4, 100, None)
TURN = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Any:
    return read_chat(json.dumps({"messages": TURN, **fields}).encode())


def requests(info: Loaded = TALKING, **fields: Any) -> list[dict[str, Any]]:
    return translate_chat(chat(**fields), info, lambda url: url.encode(), Defaults()).requests


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        requests(**fields)
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_ask_for_nothing_are_accepted_and_others_refused(name: str) -> None:
    plain = name not in ChatRequest.__struct_fields__
    read = (
        (lambda **fields: read_completion(json.dumps({"prompt": "x", **fields}).encode())) if plain else chat
    )
    assert name in (CompletionRequest if plain else ChatRequest).__struct_fields__
    for value in (None, *NEUTRAL[name]):
        read(**{name: value})
    for value in ({"a": 1}, [1], 0.5, "other", 3):
        with pytest.raises(RequestError) as error:
            read(**{name: value})
        assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


def test_false_is_not_zero() -> None:
    with pytest.raises(RequestError):
        chat(frequency_penalty=False)
    chat(frequency_penalty=0.0)


def test_what_a_client_repeats_of_an_answer() -> None:
    answer = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    turns = requests(messages=[*TURN, answer, *TURN])[0]["messages"]
    assert turns[1] == {"role": "assistant", "content": "yes"}
    assert refusal(messages=[{**answer, "tool_calls": [{"id": "1"}]}]).param == "messages[0].tool_calls[0]"


def test_a_developer_is_the_system() -> None:
    assert (
        requests(messages=[{"role": "developer", "content": "be brief"}, *TURN])[0]["messages"][0]["role"]
        == "system"
    )


def test_parts_keep_their_order() -> None:
    content = [
        {"type": "image_url", "image_url": {"url": "one"}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "two", "detail": "high"}},
    ]
    turns = requests(messages=[{"role": "user", "content": content}])[0]["messages"]
    assert turns[0]["content"] == [
        {"type": "image", "image": b"one"}, {"type": "text", "text": "and"}, {"type": "image", "image": b"two"},
    ]  # fmt: skip


def test_a_model_without_a_chat_template_reads_one_message() -> None:
    content = [
        {"type": "image_url", "image_url": {"url": "one"}},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    (request,) = requests(CAPTIONING, messages=[{"role": "user", "content": content}])
    assert request["images"] == [b"one"] and request["prompt"] == "a\nb"
    (request,) = requests(CAPTIONING, messages=[{"role": "user", "content": content[:1]}])
    assert "prompt" not in request  # the bundle's own
    for messages in ([*TURN, *TURN], [{"role": "system", "content": "x"}]):
        with pytest.raises(RequestError, match="no chat template"):
            requests(CAPTIONING, messages=messages)


def test_defaults_are_openais() -> None:
    (request,) = requests()
    assert request["plain_text"] is True
    assert request["temperature"] == 1.0 and request["max_new_tokens"] == TALKING.max_length
    body = chat(max_completion_tokens=7, temperature=0, top_k=-1, stop=["a", "b"], seed=-1, ignore_eos=True)
    (request,) = translate_chat(body, TALKING, str.encode, Defaults(0.3, special_tokens=True)).requests
    assert request | {"messages": 0} == {
        "messages": 0, "max_new_tokens": 7, "temperature": 0, "top_k": 0, "stop": ["a", "b"], "seed": (1 << 64) - 1,
        "ignore_eos": True, "plain_text": False,
    }  # fmt: skip
    assert refusal(max_tokens=1, max_completion_tokens=2).param == "max_completion_tokens"


def test_every_field_that_is_read_is_an_option_of_the_runtime() -> None:
    known = GenerateOptions.__annotations__
    asked = requests(
        top_p=0.5, min_p=0.1, repetition_penalty=1.2, draft="none", draft_length=2, deadline=3.0, top_k=4, stop="x", seed=1,
        structured_outputs={"regex": "a+"},
    )[0]  # fmt: skip
    assert {name for name in asked if name not in known} == {"messages"}


def test_answers_of_a_form() -> None:
    schema = {"type": "object"}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert requests(response_format=format_)[0]["schema"] == schema
    assert requests(response_format={"type": "json_object"})[0]["schema"] == {"type": "object"}
    assert "schema" not in requests(response_format={"type": "text"})[0]
    assert requests(structured_outputs={"json": schema})[0]["schema"] == schema
    assert refusal(response_format=format_, structured_outputs={"regex": "a"}).param == "structured_outputs"
    assert refusal(response_format={"type": "yaml"}).param == "response_format.type"


def test_completions() -> None:
    def translated(**fields: Any) -> Any:
        body = read_completion(json.dumps({"max_tokens": 4, **fields}).encode())
        return translate_completion(body, TALKING, Defaults())

    both = translated(prompt=["a", "b"], n=2, seed=5)
    assert [(each["prompt"], each["seed"]) for each in both.requests] == [
        ("a", 5),
        ("a", 6),
        ("b", 5),
        ("b", 6),
    ]
    assert both.raw and both.top is None
    for prompt in ([], [1, 2], [[1]], ["a", 1]):
        with pytest.raises(RequestError, match="prompt"):
            translated(prompt=prompt)
    with pytest.raises(RequestError, match="logprobs: 6"):
        translated(prompt="a", logprobs=6)
    with pytest.raises(RequestError, match="130 answers"):
        translated(prompt=["a", "b"], n=65)


@pytest.mark.parametrize(
    ("kind", "message", "status", "param", "code"),
    [
        ("OptionError", "max_new_tokens: 0 is below 1", 400, "max_tokens", None),
        ("OptionError", "draft: x is not here", 400, "draft", None),
        ("OptionError", "draft_nodes asks", 400, None, None),
        ("ImageError", "the image: damaged", 400, "messages", "invalid_image"),
        ("PromptError", "the prompt is empty", 400, "messages", "invalid_prompt"),
        ("PromptTooLongError", "the prompt has 9 tokens", 400, "messages", "context_length_exceeded"),
        ("GrammarError", "no token", 400, "response_format", "invalid_grammar"),
        ("QueueFullError", "64 wait", 429, None, "queue_full"),
        ("ClosedError", "closed", 503, None, "draining"),
        ("LostProcessError", "ended", 503, None, "process_lost"),
        ("NumericsError", "NaN", 500, None, "NumericsError"),
        ("ValueError", "ValueError: a mistake of ours", 500, None, "ValueError"),
    ],
)
def test_errors_in_the_clients_words(
    kind: str, message: str, status: int, param: str | None, code: str | None
) -> None:
    names = {"max_new_tokens": "max_tokens", "prompt": "messages", "schema": "response_format"}
    error = error_of(Failure(kind, message), names)
    assert (error.status, error.param, error.code) == (status, param, code)
    if param == "max_tokens":
        assert error.message == "max_tokens: 0 is below 1"
    assert ("Retry-After" in error.headers) == (status in (429, 503))
    assert ("x-should-retry" in error.headers) == (status in (500, 504))


def test_tokens_of_a_prompt_count_once() -> None:
    counts = [Counts(prompt_tokens=prompt, tokens=3, accepted=1, proposed=4) for prompt in (5, 5, 7, 7)]
    usage = usage_of(counts, 2)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (12, 12, 24)
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 12


def test_acceptance_histogram() -> None:
    """21 cycles drafted four tokens; 13 had all of them accepted."""
    counts = Counts(
        accepted=65, proposed=80, drafting_cycles=21, deepest=4, accepted_by_depth=[20, 16, 16, 13]
    )
    found = speculation_of(counts)
    assert found is not None and found["acceptance_histogram"] == [1, 4, 0, 3, 13]
    assert found["mean_acceptance_length"] == 1 + 65 / 21
    short = speculation_of(Counts(drafting_cycles=2, deepest=3, proposed=6))
    assert short is not None and short["acceptance_histogram"] == [2, 0, 0, 0]
    assert speculation_of(Counts(tokens=5)) is None
