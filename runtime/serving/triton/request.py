"""From the tensors of one of Triton's requests to a request of `Scheduler.submit`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...common.bounded_files import parse_json
from ...common.errors import OptionError, PromptError
from ...common.foreign_errors import raise_if_foreign
from ...common.options import declared_options
from ...families.parts import PLACES
from ...session.options import GenerateOptions
from .config import INPUTS


class TritonRequest(NamedTuple):
    """What a client asks for. `asked`: what `Scheduler.submit` takes; `streamed`: whether text goes out piece by piece."""

    asked: dict[str, Any]
    streamed: bool


def read_request(triton: Any, request: Any) -> TritonRequest:
    """The inputs of `request`; `triton` is the module `triton_python_backend_utils`.

    Raises `OptionError` and `PromptError`. Options are checked by name here, their values by `Scheduler.submit`.
    """
    given: dict[str, np.ndarray] = {}
    for spec in INPUTS:
        tensor = triton.get_input_tensor_by_name(request, spec.name)
        if tensor is not None:
            given[spec.name] = values = tensor.as_numpy().reshape(-1)
            if not spec.several and len(values) != 1:
                raise OptionError(f"{spec.name}: {len(values)} values; give one, or leave the input out")
    asked: dict[str, Any] = {"images": list(given["image"])} if len(given.get("image", ())) else {}
    if "prompt" in given:
        asked["prompt"] = given["prompt"][0]
    if "messages" in given:
        asked["messages"] = _messages(given["messages"][0])
    options = _options(given["options"][0]) if "options" in given else {}
    named = {
        name: _number(given[name][0]) for name in ("max_new_tokens", "temperature", "seed") if name in given
    }
    if twice := sorted(options.keys() & named.keys()):
        raise OptionError(f"{twice[0]} is given twice, in options and as an input; give one of them")
    return TritonRequest(
        {**asked, **options, **named}, bool(given["stream"][0]) if "stream" in given else False
    )


def _number(value: Any) -> int | float:
    """A float32 as the shortest decimal that stands for it: 0.7, so that it draws what 0.7 draws elsewhere."""
    return float(str(value)) if isinstance(value, np.floating) else int(value)


def _options(data: bytes) -> dict[str, Any]:
    options = _json("options", data, OptionError)
    if not isinstance(options, dict):
        raise OptionError(f"options: {options!r:.80} is not a JSON object of options by name")
    known = declared_options(GenerateOptions)  # deprecated names and pictures are none
    if unknown := sorted(options.keys() - known.keys()):
        raise OptionError(f"options: no option {unknown[0]!r:.80}; there are {', '.join(known)}")
    return options


def _messages(data: bytes) -> list[Any]:
    """Raises `PromptError` also for a part that names a file or an address: a client must not choose what is read here."""
    messages = _json("messages", data, PromptError)
    if not isinstance(messages, list):
        raise PromptError(f"messages: {messages!r:.80} is not a JSON list of messages")
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and any(part.get(place) is not None for place in PLACES.get(kind, ())):
                raise PromptError(
                    f'message {at}, part {number}: its {kind} is given in the part; write {{"type": "image"}} there, and '
                    "give the bytes of the picture in the input image"
                )
    return messages


def _json(name: str, data: bytes, failure: type[OptionError | PromptError]) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        raise_if_foreign(error)
        raise failure(f"{name} is not JSON: {error}") from None
