"""The real openai client and curl against `vlmexport serve`: answers are those of `Session.generate`."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

openai = pytest.importorskip("openai")
from vlmexport.runtime.session.result import Result  # noqa: E402
from vlmexport.runtime.session.session import Session  # noqa: E402

from tests.support.running_server import RunningServer, data_url, picture, sse  # noqa: E402

Served = tuple[RunningServer, Session, Any]


@pytest.fixture(scope="module")
def seeing(tiny_bundle: Callable[[str], Any]) -> Iterator[Served]:
    """A model with a chat template that reads pictures: its server, a session of ours, the client."""
    path = tiny_bundle("gemma3").path
    with RunningServer(path, "--max-batch", "4") as server, Session.load(path) as session:
        yield server, session, client(server)


@pytest.fixture(scope="module")
def writing(tiny_bundle: Callable[[str], Any]) -> Iterator[Served]:
    """A text model."""
    path = tiny_bundle("llama").path
    with (
        RunningServer(path, "--max-batch", "4", "--served-name", "tiny") as server,
        Session.load(path) as session,
    ):
        yield server, session, client(server)


def client(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100)


def messages(seed: int) -> list[dict[str, Any]]:
    """As a client sends them: a text between two pictures, in their order."""
    urls = [
        {"type": "image_url", "image_url": {"url": data_url(picture(seed + at)), "detail": "low"}}
        for at in (0, 1)
    ]
    return [{"role": "user", "content": [urls[0], {"type": "text", "text": "and this one"}, urls[1]]}]


def own_messages(seed: int) -> list[dict[str, Any]]:
    """The same as the runtime reads them."""
    parts = [{"type": "image", "image": picture(seed + at)} for at in (0, 1)]
    return [{"role": "user", "content": [parts[0], {"type": "text", "text": "and this one"}, parts[1]]}]


def name_of(api: Any) -> str:
    return next(iter(api.models.list())).id


def streamed(api: Any, **asked: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """(text and finish reason by choice, the last event)."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    event = None
    for event in api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index, "")
    return texts, reasons, event


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"temperature": 1, "seed": -3, "top_p": 0.7}],
)
def test_streamed_is_whole_is_generate(seeing: Served, sampling: dict[str, Any]) -> None:
    _server, session, api = seeing
    asked = {"model": name_of(api), "messages": messages(3), "max_tokens": 12, **sampling}
    own = dict(sampling)
    if "seed" in own:
        own["seed"] %= 1 << 64
    want = session.generate(messages=own_messages(3), max_new_tokens=12, **own)
    whole = api.chat.completions.create(**asked)
    assert whole.choices[0].message.content == want.text
    assert whole.choices[0].finish_reason == {"eos": "stop"}.get(want.finish_reason, want.finish_reason)
    texts, reasons, last = streamed(api, **asked)
    assert texts == {0: want.text} and reasons == {0: whole.choices[0].finish_reason}
    for usage in (whole.usage, last.usage):
        assert usage.completion_tokens == len(want.tokens)
        assert usage.prompt_tokens == want.stats.prompt_tokens


def test_requests_together_give_what_each_gives_alone(seeing: Served) -> None:
    """More than fit the batch, at once."""
    _server, session, api = seeing
    name = name_of(api)

    def ask(seed: int) -> str:
        asked = {"model": name, "messages": messages(seed), "max_tokens": 4 + seed, "temperature": 0}
        if seed % 2:
            return api.chat.completions.create(**asked).choices[0].message.content
        return streamed(api, **asked)[0][0]

    with ThreadPoolExecutor(10) as pool:
        texts = list(pool.map(ask, range(10)))
    for seed, text in enumerate(texts):
        assert text == session.generate(messages=own_messages(seed), max_new_tokens=4 + seed).text, seed


def test_special_tokens_of_a_message_are_plain_text(writing: Served) -> None:
    _, session, api = writing
    turn = [{"role": "user", "content": "hello<|im_end|>"}]
    answer = api.chat.completions.create(model="tiny", messages=turn, max_tokens=6, temperature=0)
    want = session.generate(prompt=turn, max_new_tokens=6, plain_text=True)
    assert answer.choices[0].message.content == want.text
    assert answer.usage.prompt_tokens == want.stats.prompt_tokens
    assert want.stats.prompt_tokens > session.generate(prompt=turn, max_new_tokens=1).stats.prompt_tokens


def test_choices_have_seeds_of_their_own(writing: Served) -> None:
    _server, session, api = writing
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 1,
        "seed": 40,
    }
    answer = api.chat.completions.create(**asked, n=3)
    want = [
        session.generate(
            prompt=[{"role": "user", "content": "hello"}], max_new_tokens=8, temperature=1, seed=40 + at
        )
        for at in range(3)
    ]
    assert [choice.message.content for choice in answer.choices] == [result.text for result in want]
    assert len({result.text for result in want}) > 1
    assert streamed(api, **asked, n=3)[0] == {at: result.text for at, result in enumerate(want)}
    assert answer.usage.prompt_tokens == want[0].stats.prompt_tokens  # the choices share it
    assert answer.usage.completion_tokens == sum(len(result.tokens) for result in want)


def test_completions_write_the_prompt_as_it_is(writing: Served) -> None:
    from vlmexport.runtime.families import RawPrompt

    _server, session, api = writing
    prompts = ["once upon", "a time"]
    answer = api.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, logprobs=2)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        want = session.generate(prompt=RawPrompt(prompt), max_new_tokens=6, logprobs=2)
        assert choice.text == want.text and want.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(
            [each.logprob for each in want.logprobs], abs=1e-4
        )
        assert choice.logprobs.text_offset[0] == 0 and len(choice.logprobs.tokens) == len(want.tokens)
    pieces = api.completions.create(model="tiny", prompt=prompts[0], max_tokens=6, temperature=0, stream=True)
    assert "".join(each.choices[0].text for each in pieces) == answer.choices[0].text


def noted(content: Any) -> list[tuple[str, float]]:
    return [(each.token, round(each.logprob, 4)) for each in content or []]


def test_logprobs_whole_and_streamed(writing: Served) -> None:
    _server, session, api = writing
    turn = [{"role": "user", "content": "hello"}]
    asked = {
        "model": "tiny",
        "messages": turn,
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    want = session.generate(prompt=turn, max_new_tokens=9, logprobs=2).logprobs
    assert want is not None
    content = api.chat.completions.create(**asked).choices[0].logprobs.content
    assert [each.logprob for each in content] == pytest.approx([each.logprob for each in want], abs=1e-4)
    assert [len(each.top_logprobs) for each in content] == [2] * len(want)
    assert b"".join(bytes(each.bytes) for each in content).decode("utf-8", "replace")
    events = list(api.chat.completions.create(**asked, stream=True))
    pieces = [part for each in events for part in noted(each.choices[0].logprobs.content)]
    assert pieces == noted(content)


def test_structured_answers(writing: Served) -> None:
    _server, _session, api = writing
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a colour"}],
        "temperature": 0,
        "max_tokens": 100,
    }
    schema = {
        "type": "object",
        "properties": {"hot": {"type": "boolean"}},
        "required": ["hot"],
        "additionalProperties": False,
    }
    answer = api.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": {"name": "state", "schema": schema}}
    ).choices[0]
    assert answer.finish_reason == "stop" and list(json.loads(answer.message.content)) == ["hot"]
    answer = api.chat.completions.create(
        **asked, extra_body={"structured_outputs": {"choice": ["red", "blue"]}}
    ).choices[0]
    assert answer.message.content in ("red", "blue")
    with pytest.raises(openai.BadRequestError) as error:
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
        api.chat.completions.create(**asked, response_format=wrong)
    assert error.value.body["param"] == "response_format"


def test_speculation_is_reported_as_vllm_does(writing: Served) -> None:
    _server, session, api = writing
    turn = [{"role": "user", "content": "one two one two one two one two one"}]
    asked = {"model": "tiny", "messages": turn, "max_tokens": 40, "temperature": 0}
    extra = {"draft": "prompt-lookup", "draft_length": 4, "ignore_eos": True}
    want = session.generate(prompt=turn, max_new_tokens=40, **extra).stats
    metrics = api.chat.completions.create(**asked, extra_body=extra).metrics
    found = metrics["speculative_decoding"]
    steps = sum(count for (nodes, _), count in want.shapes.items() if nodes)
    assert steps, "nothing was drafted"
    assert found["num_spec_steps"] == steps == sum(found["acceptance_histogram"])
    assert found["num_accepted_draft_tokens"] == want.accepted
    assert sum(at * count for at, count in enumerate(found["acceptance_histogram"])) == want.accepted
    assert found["num_draft_tokens"] == want.proposed and found["num_spec_tokens"] == 4
    assert found["mean_acceptance_length"] == pytest.approx(1 + want.accepted / steps)
    assert metrics["time_to_first_token_ms"] > 0
    content = (
        api.chat.completions.create(**asked, logprobs=True, extra_body=extra).choices[0].logprobs.content
    )
    assert sum(each.drafted for each in content) == want.accepted
    plain = api.chat.completions.create(**asked, extra_body={"draft": "none"}).metrics
    assert plain["speculative_decoding"] is None


def refused(error: Any, status: int, param: str | None, code: str | None) -> None:
    assert (error.value.status_code, error.value.body["param"], error.value.body["code"]) == (
        status,
        param,
        code,
    ), error.value


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"extra_body": {"best": 1}}, "best", "unknown_parameter"),
        ({"extra_body": {"max_tokens": "many"}}, "max_tokens", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": openai.omit, "max_completion_tokens": -1}, "max_completion_tokens", None),
        ({"temperature": -1}, "temperature", None),
        ({"top_p": 1.5}, "top_p", None),
        ({"n": 0}, "n", None),
        ({"n": 129}, "n", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role", "invalid_type"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages[0].content[0].type", "invalid_type"),
        ({"messages": [{"role": "user", "content": "hello " * 500}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "hi", "name": "bob"}]}, "messages", "invalid_prompt"),
        ({"extra_body": {"draft": "oracle"}}, "draft", None),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    writing: Served, change: dict[str, Any], param: str, code: str | None
) -> None:
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    with pytest.raises(openai.BadRequestError) as error:
        writing[2].chat.completions.create(**{**asked, **change})
    refused(error, 400, param, code)


def test_pictures_that_cannot_be_read(seeing: Served) -> None:
    _server, _session, api = seeing
    name = name_of(api)

    def ask(url: str, stream: bool = False) -> Any:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return api.chat.completions.create(
            model=name, messages=[{"role": "user", "content": content}], max_tokens=4, stream=stream
        )

    for url, code in (
        ("data:image/png;base64,AAAA", "invalid_image"),
        ("data:image/png;base64,A*A", "invalid_image_url"),
        ("data:image/png,AAAA", "invalid_image_url"),
        ("http://127.0.0.1/x.png", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"),
        ("/etc/passwd", "invalid_image_url"),
    ):
        for stream in (False, True):  # a stream has not begun: its error is one, too
            with pytest.raises(openai.BadRequestError) as error:
                ask(url, stream)
            refused(error, 400, "messages", code)


def test_another_model_is_not_found(writing: Served) -> None:
    _server, _session, api = writing
    with pytest.raises(openai.NotFoundError) as error:
        api.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "hello"}])
    refused(error, 404, "model", "model_not_found")
    assert api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
def test_curl(writing: Served) -> None:
    server, session, _ = writing
    turn = [{"role": "user", "content": "hello"}]
    want: Result = session.generate(prompt=turn, max_new_tokens=6)
    body = json.dumps({"messages": turn, "max_tokens": 6, "temperature": 0, "stream": True})
    command = [
        "curl",
        "-sN",
        f"{server.url}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
    ]
    events = sse(subprocess.run(command, capture_output=True, check=True, timeout=100).stdout)
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in events[:-1]) == want.text
    assert events[-2]["choices"][0]["vlmexport"]["finish_reason"] == want.finish_reason
