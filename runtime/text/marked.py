"""Which text of a prompt is a template's own, and which is the caller's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
        if not self.texts:
            return [prompt], []
        parts = re.split(f"({'|'.join(map(re.escape, self.texts))})", prompt)
        return parts[::2], [self.texts[mark] for mark in parts[1::2]]

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
