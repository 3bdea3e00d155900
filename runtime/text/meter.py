"""What a rendering of a chat template may still do: one budget of work, and bounds on texts, depths and keys."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

from ..common.errors import PromptError

WORK = 2_000_000
"""Units of one rendering: seconds at most, also on a small board. A conversation of 100 messages takes some thousands."""

LONGEST = 4_000_000
"""Characters of a rendered prompt, of any text on the way to it, and of all texts in a value that is looked through."""

DEEPEST = 100
"""Levels of lists, mappings and namespaces in a value: Python hashes tuples by recursion in C, without a bound."""

MOST_BITS = 2048
UNIT_BYTES = 256
"""Bytes of texts for one unit: all texts of a rendering take 512 MB at most, even if the template keeps every one. A
character takes 1, 2 or 4 bytes, as the widest one of its text."""
_ELEMENTS = 3
"""Elements of a new list for one unit: each may be a new text, which takes some 80 bytes."""

MOST_EQUAL_HASHES = 64
"""Keys of a mapping with one hash: each is compared with all before it. By chance there are never two."""

MANY = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
SIZED = (range, Mapping, *MANY)


def size_of(text: str) -> int:
    """Units for a text that is there."""
    return sys.getsizeof(text) // UNIT_BYTES


class TooMuch(PromptError):
    """A template that does more than it may."""


class Meter:
    """What a rendering may still do."""

    def __init__(self, work: int = WORK):
        self.left = work

    def pay(self, units: int) -> None:
        """Raise `TooMuch` when the budget is spent."""
        self.left -= units
        if self.left < 0:
            raise TooMuch(
                f"the chat template does more than {WORK:,} steps of work for these messages; shorten them, or build the "
                "bundle with another template"
            )

    def text(self, characters: int) -> None:
        """Pay for a text that will be made."""
        if characters > LONGEST:
            raise TooMuch(f"the chat template wrote more than {LONGEST} characters")
        self.pay(1 + characters // UNIT_BYTES)

    def things(self, *values: Any) -> int:
        """Pay for values as deep as they go, shared parts as often as they appear; returns the characters of their texts.

        Whatever Python does with a value in C (hash, compare, print, copy) takes no more than was paid for it here.
        """
        characters, level = 0, values
        for _ in range(DEEPEST):
            inner: list[Any] = []
            units = len(level)
            for value in level:
                if isinstance(value, str):
                    characters += len(value)
                    units += size_of(value)
                elif isinstance(value, int):
                    pass
                elif isinstance(value, range):
                    units += len(value)
                elif isinstance(value, MANY):
                    if value:
                        self.pay(len(value))
                        inner += value
                else:
                    if isinstance(value, Namespace):
                        value = value._Namespace__attrs  # type: ignore[attr-defined]
                    if isinstance(value, Mapping) and value:
                        self.pay(2 * len(value))
                        inner += value
                        inner += value.values()
            self.pay(units)
            if characters > LONGEST:
                self.text(characters)
            if not inner:
                return characters
            level = inner
        raise TooMuch(f"the chat template nests values more than {DEEPEST} levels deep")

    def keys(self, keys: Collection[Any]) -> None:
        """Pay for what hashes the keys of one mapping or set."""
        self.things(*keys)
        self.equal_hashes(Counter(map(hash, keys)))

    def equal_hashes(self, count: Mapping[int, int]) -> None:
        """Refuse keys that are to be compared with each other: `count` is hash → how many have it."""
        if max(count.values(), default=0) > MOST_EQUAL_HASHES:
            raise TooMuch(f"the chat template makes more than {MOST_EQUAL_HASHES} keys of one hash")

    def bits(self, bits: int) -> None:
        """Refuse a number that takes more than `MOST_BITS`."""
        if bits > MOST_BITS:
            raise TooMuch(f"the chat template computes a number of more than {MOST_BITS} bits")

    def joined(self, parts: Iterable[str]) -> str:
        """One text of many, each paid for when it is there."""
        pieces: list[str] = []
        size = 0
        for part in parts:
            pieces.append(part)
            size += len(part)
            self.text(len(part))
            if size > LONGEST:
                self.text(size)
        text = "".join(pieces)
        self.pay(size_of(text))
        return text

    def made(self, value: Any) -> Any:
        """The result of an operation, paid for; a lazy one pays for every element that is taken."""
        if isinstance(value, str):
            self.text(len(value))
            self.pay(size_of(value))
        elif isinstance(value, int):
            self.bits(value.bit_length())
        elif isinstance(value, Iterator):
            return self.elements(value)
        elif isinstance(value, list | tuple):
            self.pay(1 + len(value) // _ELEMENTS)
        elif isinstance(value, SIZED):
            self.pay(1 + len(value) // 16)
        return value

    def elements(self, values: Iterable[Any]) -> Iterator[Any]:
        """The elements, each paid for when it is taken."""
        for value in values:
            self.pay(1)
            yield value


METER: ContextVar[Meter] = ContextVar("vlmexport_template_meter")
"""Of the rendering that runs."""
