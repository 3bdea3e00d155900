"""What an answer must be: a JSON schema, a regular expression, one of several texts, or a grammar in Lark's notation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..common.errors import OptionError
from ..common.foreign_errors import raise_if_foreign

SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it: fixed spaces are tokens that need no thought. "x-guidance" of a schema says otherwise."""
LONGEST = 1 << 20
"""Characters of one."""


@dataclass(frozen=True)
class Grammar:
    """`option` gave it; `source` is what llguidance reads: a grammar in Lark's notation, or, of a schema, JSON. `parse` makes
    the value of a whole answer's text."""

    option: str
    source: str
    parse: Callable[[str], Any] = str


def of_schema(name: str, value: Any) -> Grammar:
    """Of a JSON schema, a dict or its text, or of a class of pydantic's, whose instances are then what answers are parsed to.

    Raises `OptionError` for anything else.
    """
    parse: Callable[[str], Any] = json.loads
    given = value
    try:
        if isinstance(value, type) and hasattr(value, "model_json_schema"):
            parse, value = value.model_validate_json, value.model_json_schema()  # type: ignore[attr-defined]
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise TypeError(type(schema).__name__)
        body = json.dumps({**schema, "x-guidance": {**SEPARATORS, **(schema.get("x-guidance") or {})}})
    except (ValueError, TypeError, RuntimeError) as error:
        raise_if_foreign(error)
        raise OptionError(
            f"{name}: {given!r:.80} is no JSON schema; give a dict, its JSON text, or a class of pydantic's"
        ) from None
    return Grammar(name, _sized(name, body), parse)


def of_regex(name: str, value: Any) -> Grammar:
    """Of a regular expression that the whole answer matches, in the syntax of Rust's crate `regex`."""
    return Grammar(name, _sized(name, _text(name, value)))


def of_choices(name: str, value: Any) -> Grammar:
    """Of texts, one of which is the answer."""
    texts = list(value) if isinstance(value, list | tuple) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise OptionError(f"{name}: {value!r:.80} is no list of texts; give one or more, none of them empty")
    return Grammar(
        name, _sized(name, "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))
    )


def of_lark(name: str, value: Any) -> Grammar:
    """Of a grammar in llguidance's dialect of Lark's notation."""
    return Grammar(name, _sized(name, _text(name, value)))


READERS: dict[str, Callable[[str, Any], Grammar]] = {
    "schema": of_schema,
    "regex": of_regex,
    "choices": of_choices,
    "grammar": of_lark,
}
"""By the option of a request, which may give one of them."""


def read_grammar(name: str, value: Any) -> Grammar:
    """The value of the option `name`; one that was read before as it is. Raises `OptionError`."""
    return value if isinstance(value, Grammar) else READERS[name](name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{name}: {value!r:.80} is no text of a grammar")
    return value


def _sized(name: str, text: str) -> str:
    if len(text) > LONGEST:
        raise OptionError(f"{name}: {len(text):,} characters; a grammar may have {LONGEST:,}")
    return text
