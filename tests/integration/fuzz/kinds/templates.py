"""Chat templates of bundles from anywhere: what is served is what plain Jinja renders, with the setup of transformers."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.fuzz import jinja_sources
from tests.integration.fuzz.cases import Case

from .base import call

PUBLISHED = Path(__file__).parents[2] / "published" / "checkpoints"
BY_RULE = (
    "not allowed", " more than ", "with a long format", "beyond the largest float", "'lipsum'", "'pprint'", "'random'",
    "'striptags'", "'urlize'", "'wordwrap'", "'xmlattr'",
)  # fmt: skip
"""What a refusal says that plain Jinja would not make."""


class Seeds:
    """The templates of the published layouts."""

    def __init__(self) -> None:
        found = {
            template
            for path in sorted(PUBLISHED.glob("*/*.json"))
            if path.name in ("chat_template.json", "tokenizer_config.json")
            for template in _templates(json.loads(path.read_text("utf-8")).get("chat_template"))
        }
        self._real = sorted(found)

    def make(self, rng: random.Random, folder: Path) -> Case:
        if rng.random() < 0.7:
            template = jinja_sources.written(rng)
        else:
            template = jinja_sources.mutant(rng.choice(self._real), rng)
        messages = jinja_sources.conversation(rng)
        special = {"bos_token": "<s>", "eos_token": rng.choice(("</s>", "<|im_end|>", ""))}
        generation = rng.random() < 0.7
        (folder / "template.jinja").write_text(template, "utf-8", "surrogatepass")
        (folder / "messages.txt").write_text(repr(messages), "utf-8")
        return Case(call(lambda: _render(template, messages, special, generation)))


def prepare(folder: Path) -> Seeds:
    """Templates of published models."""
    from transformers.utils import chat_template_utils  # noqa: F401  # a case need not import it

    return Seeds()


def _templates(found: Any) -> list[str]:
    """`chat_template` as tokenizer_config.json has it: one, several with names, or none."""
    if isinstance(found, list):
        return [each["template"] for each in found]
    return [found] if isinstance(found, str) else []


def _render(template: str, messages: list[dict[str, Any]], special: dict[str, str], generation: bool) -> None:
    from vlmexport.runtime.common.errors import VlmexportError
    from vlmexport.runtime.text.chat import render_chat

    before = repr(messages)
    try:
        found = render_chat(template, messages, special, add_generation_prompt=generation)
    except VlmexportError as error:
        assert repr(messages) == before, "refused, and the messages are changed"
        if not any(words in str(error) for words in BY_RULE):
            expected = _plain(template, messages, special, generation)
            assert isinstance(expected, Exception) or _has_address(expected), (
                f"refused ({error}), and Jinja renders {expected!r:.200}"
            )
        raise
    assert repr(messages) == before, "the template changed the messages"
    expected = _plain(template, messages, special, generation)
    if isinstance(expected, str) and _has_address(expected):
        return
    if found != expected:  # Jinja's optimizer writes -7 for (-1 - 6), and Python reads -7 ** 0 as -(7 ** 0)
        expected = _plain(template, messages, special, generation, optimized=False)
        assert found == expected, f"rendered {found!r:.400}, and Jinja {expected!r:.400}"


def _has_address(text: str) -> bool:
    """Whether an object is printed that has no text of its own: no two renderings are equal."""
    return " at 0x" in text or "x0 ta " in text  # also backwards


def _plain(
    template: str,
    messages: list[dict[str, Any]],
    special: dict[str, str],
    generation: bool,
    optimized: bool = True,
) -> str | Exception:
    """What transformers renders, or the exception that it raises."""
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    try:
        with _bounded():
            environment = _cached_compile_jinja_template("").environment
            environment.optimized = optimized
            return environment.from_string(template).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=generation, **special
            )
    except Exception as error:
        return error


@contextlib.contextmanager
def _bounded(seconds: int = 2, memory: int = 512 << 20) -> Iterator[None]:
    """Plain Jinja has no bounds of its own."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{seconds} s")

    before, limits = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + memory, limits[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
