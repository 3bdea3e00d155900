"""Which text of a prompt is a template's own, and which is the caller's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TypeAlias

Change: TypeAlias = "Callable[[Sequence[str]], list[str]]"
"""Changes literals, which stand in this order in one prompt."""

MARK = "Qtext{}Q"
"""Stands for a text of the caller's, by its number."""


@dataclass(frozen=True)
class Marked:
    """A prompt with a mark in place of each text of the caller's: `prompt`; `texts` are these by their marks, and `fields`
    further strings of the caller's, which the prompt may hold as they are."""

    prompt: str
    texts: Mapping[str, str]
    fields: tuple[str, ...] = ()

    @classmethod
    def of_text(cls, text: str, before: str = "") -> Marked:
        """Of a prompt without a template: `before`, then the caller's text."""
        mark = MARK.format(0)
        return cls(before + mark, {mark: text})

    def cut(self, prompt: str) -> tuple[list[str], list[str]]:
        """(the literals of a prompt with these marks, one more than marks; the texts between them)."""
        literals, marks = self._split(prompt)
        return literals, [self.texts[mark] for mark in marks]

    @property
    def literals(self) -> list[str]:
        """Those of its own prompt."""
        return self._split(self.prompt)[0]

    def _split(self, prompt: str) -> tuple[list[str], list[str]]:
        """(literals, the marks between them)."""
        if not self.texts:
            return [prompt], []
        parts = re.split(f"({'|'.join(map(re.escape, self.texts))})", prompt)
        return parts[::2], parts[1::2]

    def written(self, rendered: str) -> list[str] | None:
        """What stands in place of each mark in the prompt, `rendered`: the texts, but for white space at their ends, or an end
        of a text (of an answer whose reasoning is left out). None where it cannot be told: the template changes texts."""
        literals, texts = self.cut(self.prompt)
        if not rendered.startswith(literals[0]):
            return None
        at, passages = len(literals[0]), []
        for number, (text, behind) in enumerate(zip(texts, literals[1:], strict=True), 1):
            passage = _passage(rendered, at, text, behind, last=number == len(texts))
            if passage is None:
                return None
            passages.append(passage)
            at += len(passage) + len(behind)
        return passages if at == len(rendered) else None

    def changed(self, rendered: str, change: Change) -> tuple[str, Marked]:
        """(the prompt `rendered`, these marks) with `change` made to the literals, and to no text of the caller's. Where it
        cannot be told which these are, `change` gets the whole prompt, and may refuse it."""
        literals, marks = self._split(self.prompt)
        literals, passages = change(literals), self.written(rendered)
        prompt = _interleaved(literals, passages) if passages is not None else change([rendered])[0]
        return prompt, replace(self, prompt=_interleaved(literals, marks))


@dataclass(frozen=True)
class LaidOut:
    """The text of a prompt; which of it is the caller's, `marked`; and whether the tokenizer's special tokens go around it,
    asked with what the layout itself writes."""

    text: str
    marked: Callable[[], Marked]
    add_special_tokens: Callable[[str], bool]


def _interleaved(literals: Iterable[str], between: Iterable[str]) -> str:
    return "".join(chain.from_iterable(zip_longest(literals, between, fillvalue="")))


def _passage(rendered: str, at: int, text: str, behind: str, last: bool) -> str | None:
    for passage in dict.fromkeys((text, text.rstrip(), text.lstrip(), text.strip())):
        end = at + len(passage)
        if rendered.startswith(passage, at) and rendered.startswith(behind, end):
            return passage
    end = len(rendered) - len(behind) if last else rendered.find(behind, at)
    while at <= end and rendered.startswith(behind, end):
        if text.strip().endswith(rendered[at:end].strip()):
            return rendered[at:end]
        end = -1 if last else rendered.find(behind, end + 1)
    return None
