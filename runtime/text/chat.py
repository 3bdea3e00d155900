"""Chat templates, rendered as `transformers` renders them (`apply_chat_template`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext

from ..errors import BundleError, PromptError
from .sandbox import METER, BoundedSandbox, render

LONGEST_TEMPLATE = 100_000
"""Characters. The longest templates of published models take a third of it."""


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
        raise BundleError(
            f"manifest field 'text.chat_template': {len(template)} characters; the limit is {LONGEST_TEMPLATE}"
        )
    try:
        return render(
            _compile(template),
            {
                **special_tokens,
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "tools": None,
                "documents": None,
            },
        )
    except jinja2.TemplateSyntaxError as error:
        raise BundleError(f"manifest field 'text.chat_template': line {error.lineno}: {error}") from error
    except SyntaxError as error:  # Python's own limits, of nested blocks say
        raise BundleError(f"manifest field 'text.chat_template': {error.msg}") from error
    except jinja2.exceptions.SecurityError as error:
        raise BundleError(f"manifest field 'text.chat_template': not allowed: {error}") from error
    except jinja2.TemplateError as error:
        raise PromptError(f"the chat template refuses these messages: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, AttributeError) as error:
        raise PromptError(f"the chat template fails on these messages: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


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
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
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
