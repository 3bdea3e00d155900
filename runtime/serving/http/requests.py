"""Bodies of requests: what OpenAI's API has and this server reads. A field that is not declared here is refused.

Fields that a client may send and that change nothing at their neutral value are declared in `Neutral`: another value is
refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from .errors import RequestError, unsupported

Integer = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`detail` has no effect: a picture has the resolution that the model's processor gives it."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True, kw_only=True):
    """A part of a message."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True, kw_only=True):
    """A part of a message."""

    image_url: ImageUrl


Part = TextPart | ImagePart


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. What a client repeats of an earlier answer may stand in it, as far as it is empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[None] | None = None
    reasoning: None = None
    reasoning_content: None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`include_usage`: a last event with counters."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An answer is always strict."""

    name: str | None = None
    schema: Any
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class ObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON of this schema."""

    json_schema: JsonSchema


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's field: one of them."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of request. Those below `stream_options` are vLLM's or ours; then come those without effect on an
    answer, then `NEUTRAL` ones."""

    model: str | None = None
    max_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Integer | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    draft: str | None = None
    draft_length: Integer | None = None
    deadline: float | None = None
    user: str | None = None
    metadata: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    store: Any = None
    service_tier: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    priority: Any = None


class ChatRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


class CompletionRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | Integer | list[Integer]]
    logprobs: Integer | None = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "priority": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
"""Field → its values, beside null, that ask for nothing."""

INSTEAD = {
    "frequency_penalty": "use repetition_penalty",
    "presence_penalty": "use repetition_penalty",
}

KNOWN = {
    "].role": "roles are system, developer, user and assistant",
    "].type": "parts are of type text or image_url",
}
"""End of a field's path → what an error adds."""

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def read_chat(body: bytes) -> ChatRequest:
    """Raises `RequestError` naming the field."""
    return _read(_chat, body)


def read_completion(body: bytes) -> CompletionRequest:
    """Raises `RequestError` naming the field."""
    return _read(_completion, body)


def _read(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    for name, neutral in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and not any(_equal(value, each) for each in neutral):
            raise unsupported(name, value, INSTEAD.get(name, "leave it out"))
    return request


def _equal(value: Any, neutral: Any) -> bool:
    """In JSON 0 and 0.0 are equal, and false is not 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _wrong(message: str) -> RequestError:
    """msgspec writes "Expected `int | null`, got `str` - at `$.max_tokens`"."""
    what, at, path = message.partition(" - at `$")
    param = path.rstrip("`").lstrip(".") if at else ""
    if what.startswith("Object contains unknown field `"):
        field = what.split("`")[1]
        param = f"{param}.{field}" if param else field
        return RequestError(
            f"{param}: this server does not know the field; leave it out",
            param=param,
            code="unknown_parameter",
        )
    if what.startswith("Object missing required field `"):
        field = what.split("`")[1]
        param = f"{param}.{field}" if param else field
        return RequestError(f"{param}: the field is missing", param=param, code="missing_required_parameter")
    name = f"{param}: " if param else ""
    known = next((f"; {text}" for field, text in KNOWN.items() if param.endswith(field)), "")
    return RequestError(f"{name}{what}{known}", param=param or None, code="invalid_type")
