"""From bodies of OpenAI's API to requests of the runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..messages import Loaded
from .errors import RequestError, unsupported
from .requests import (
    ChatRequest,
    Common,
    CompletionRequest,
    ImagePart,
    Message,
    ObjectFormat,
    SchemaFormat,
    TextFormat,
    TextPart,
)

MOST_CHOICES = 128
MOST_ALTERNATIVES = 20
"""Of a token, in `/v1/chat/completions`; 5 in `/v1/completions`. As OpenAI has it."""

GetPicture = Callable[[str], bytes]
"""The bytes of the picture of a URL; raises `RequestError`."""

SAME = ("top_p", "min_p", "repetition_penalty", "ignore_eos", "draft", "draft_length", "deadline")
"""Fields that the runtime calls by the same name."""

NAMES = {
    "top_p": "top_p",
    "schema": "response_format",
    "regex": "structured_outputs.regex",
    "choices": "structured_outputs.choice",
}
NAMES["grammar"] = "structured_outputs.grammar"


@dataclass(frozen=True)
class Translated:
    """What is asked of a decoding process for one body; see `messages.Ask`."""

    requests: list[dict[str, Any]]
    """One for each choice of the answer."""
    raw: bool
    top: int | None
    names: dict[str, str] = field(default_factory=dict)
    """Option of the runtime → the client's word for it."""


@dataclass(frozen=True)
class Defaults:
    """What holds where a body says nothing."""

    temperature: float = 1.0
    """OpenAI's."""
    special_tokens: bool = False
    """Whether a special token that stands in a message is one: whoever asks could close the turn of the user."""


def check_model(model: str | None, served: str) -> None:
    """Raises `RequestError` for another model than the one that is here."""
    if model not in (None, "", served):
        raise RequestError(
            f"model: {model!r:.200} is not served here; there is {served!r}",
            404, param="model", code="model_not_found",
        )  # fmt: skip


def translate_chat(
    body: ChatRequest, info: Loaded, get_picture: GetPicture, defaults: Defaults
) -> Translated:
    """Raises `RequestError`."""
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise RequestError(
            "max_tokens and max_completion_tokens are two words for one; give one", param=limit
        )
    request = _options(body, getattr(body, limit), info, defaults)
    request["plain_text"] = not defaults.special_tokens
    names = {**NAMES, "max_new_tokens": limit, "prompt": "messages"}
    _add_format(request, names, body)
    _add_messages(request, body.messages, info.has_chat_template, get_picture)
    top = _alternatives(body)
    return Translated(_choices(request, body), False, top, names)


def translate_completion(body: CompletionRequest, info: Loaded, defaults: Defaults) -> Translated:
    """The prompt is written as it is: no chat template lays it out. Raises `RequestError`."""
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not prompts or not all(isinstance(each, str) for each in prompts):
        raise unsupported("prompt", body.prompt, "give text, or a list of texts; token ids are not read")
    if body.logprobs is not None and not 0 <= body.logprobs <= 5:
        raise RequestError(f"logprobs: {body.logprobs} is not within 0 to 5", param="logprobs")
    names = {**NAMES, "max_new_tokens": "max_tokens"}
    requests = []
    for prompt in prompts:
        request = {**_options(body, body.max_tokens, info, defaults), "prompt": prompt}
        _add_structure(request, body)
        requests += _choices(request, body)
    if len(requests) > MOST_CHOICES:
        raise RequestError(
            f"prompt: {len(requests)} answers are asked for; at most {MOST_CHOICES}", param="prompt"
        )
    return Translated(requests, True, body.logprobs, names)


def _options(body: Common, limit: int | None, info: Loaded, defaults: Defaults) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in SAME}
    request = {name: value for name, value in given.items() if value is not None}
    request["max_new_tokens"] = info.max_length if limit is None else limit
    request["temperature"] = defaults.temperature if body.temperature is None else body.temperature
    if body.top_k is not None:
        request["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM's word for all of them
    if body.stop:
        request["stop"] = body.stop
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: the answer is not streamed; set stream", param="stream_options")
    return request


def _choices(request: dict[str, Any], body: Common) -> list[dict[str, Any]]:
    """One request for each of `n` answers; each has a seed of its own."""
    count = 1 if body.n is None else body.n
    if not 1 <= count <= MOST_CHOICES:
        raise RequestError(f"n: {count} is not within 1 to {MOST_CHOICES}", param="n")
    if body.seed is None:
        return [request] * count
    return [{**request, "seed": (body.seed + number) % (1 << 64)} for number in range(count)]


def _alternatives(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MOST_ALTERNATIVES:
        raise RequestError(
            f"top_logprobs: {top} is not within 0 to {MOST_ALTERNATIVES}", param="top_logprobs"
        )
    if not body.logprobs:
        if top:
            raise RequestError("top_logprobs: logprobs is not set; set it", param="top_logprobs")
        return None
    return top or 0


def _add_format(request: dict[str, Any], names: dict[str, str], body: ChatRequest) -> None:
    format_ = body.response_format
    if isinstance(format_, ObjectFormat):
        request["schema"] = {"type": "object"}
    elif isinstance(format_, SchemaFormat):
        request["schema"] = format_.json_schema.schema
    if body.structured_outputs is not None:
        if "schema" in request:
            raise RequestError(
                "structured_outputs and response_format both say what the answer must be; give one",
                param="structured_outputs",
            )
        _add_structure(request, body)
        if body.structured_outputs.json is not None:
            names["schema"] = "structured_outputs.json"
    assert format_ is None or isinstance(format_, TextFormat | ObjectFormat | SchemaFormat)


def _add_structure(request: dict[str, Any], body: Common) -> None:
    asked = body.structured_outputs
    if asked is None:
        return
    given = {"schema": asked.json, "regex": asked.regex, "choices": asked.choice, "grammar": asked.grammar}
    request.update({name: value for name, value in given.items() if value is not None})


def _add_messages(
    request: dict[str, Any], messages: list[Message], has_chat_template: bool, get_picture: GetPicture
) -> None:
    if not messages:
        raise RequestError("messages: the list is empty; give at least one message", param="messages")
    if has_chat_template:
        request["messages"] = [_turn(message, get_picture) for message in messages]
        return
    if len(messages) > 1 or messages[0].role != "user":
        raise RequestError(
            "messages: this model has no chat template; give one message, of role user", param="messages"
        )
    content = messages[0].content
    parts = [TextPart(text=content)] if isinstance(content, str) else content
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    pictures = [get_picture(part.image_url.url) for part in parts if isinstance(part, ImagePart)]
    if pictures:
        request["images"] = pictures
    if prompt := "\n".join(text for text in texts if text):
        request["prompt"] = prompt


def _turn(message: Message, get_picture: GetPicture) -> dict[str, Any]:
    """`developer` is OpenAI's newer word for `system`; templates know the older one."""
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.name is not None:
        turn["name"] = message.name
    if isinstance(message.content, str):
        return {**turn, "content": message.content}
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append({"type": "image", "image": get_picture(part.image_url.url)})
    return {**turn, "content": parts}
