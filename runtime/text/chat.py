"""Chat templates, rendered as `transformers` renders them (`apply_chat_template`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError

from ..common.errors import BundleError, PromptError, VlmexportError
from ..common.foreign_errors import is_foreign
from .errors import one_line
from .meter import METER
from .sandbox import BoundedSandbox, render

LONGEST_TEMPLATE = 100_000
"""Characters. The longest templates of published models take a third of it."""

_FIELD = "manifest field 'text.chat_template'"


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    special_tokens: Mapping[str, str] = MappingProxyType({}),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation.

    Args:
        special_tokens: name of a variable ("eos_token") → what it holds. As in transformers, the others are undefined
            and render as nothing.

    The template comes with the bundle and is untrusted: it runs in a sandbox that bounds its work and its output.
    Raises `BundleError` when the template itself is broken, `PromptError` when it refuses the messages.
    """
    if len(template) > LONGEST_TEMPLATE:  # compiling takes seconds beyond
        raise BundleError(f"{_FIELD}: {len(template)} characters; the limit is {LONGEST_TEMPLATE}")
    try:
        compiled = _compile(template)
    except Exception as error:
        _raise(_broken(error), error)
    try:
        return render(
            compiled,
            {
                **special_tokens,
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "tools": None,
                "documents": None,
            },
        )
    except Exception as error:
        _raise(_failed(error), error)


def _raise(failure: Exception, error: Exception) -> NoReturn:
    if failure in (error, error.__cause__):  # nobody's but the caller's
        raise failure
    raise failure from error


def _broken(error: Exception) -> Exception:
    """What to raise when a template cannot be compiled."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        cause = error.__cause__
        # Jinja's lexer takes whatever is raised while it reads a string for a wrong escape sequence.
        if isinstance(cause, Exception) and not isinstance(cause, UnicodeError):
            return cause
        return BundleError(f"{_FIELD}: line {error.lineno}: {one_line(error.message)}")
    if is_foreign(error):
        return error
    if isinstance(error, SecurityError):
        return BundleError(f"{_FIELD}: not allowed: {one_line(error)}")
    # Python's own limits, of nested blocks say.
    return BundleError(f"{_FIELD}: {one_line(error.msg if isinstance(error, SyntaxError) else error)}")


def _failed(error: Exception) -> Exception:
    """What to raise when a template cannot be rendered."""
    if isinstance(error, VlmexportError | MemoryError) or is_foreign(error):
        return error
    if isinstance(error, SecurityError):
        return BundleError(f"{_FIELD}: not allowed: {one_line(error)}")
    if isinstance(error, jinja2.TemplateError):
        return PromptError(f"the chat template refuses these messages: {one_line(error)}")
    return PromptError(f"the chat template fails on these messages: {one_line(error)}")


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"\d{3}", form):  # the C library pads to any width that is asked for
        raise ValueError("strftime_now with a long format")
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    if separators is not None and max(map(len, separators), default=0) > 16:
        raise ValueError("tojson with separators of more than 16 characters")
    if (len(indent) if isinstance(indent, str) else indent or 0) > 16:  # once per level
        raise ValueError("tojson with an indent of more than 16 characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None or isinstance(value, str):  # a text alone is not indented, whatever `indent` is
        return encoder.encode(value)
    return METER.get().joined(encoder.iterencode(value))  # deep values are mostly indentation


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.seal()
    return environment.from_string(template)
