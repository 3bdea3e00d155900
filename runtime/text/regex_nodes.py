"""What a regular expression is made of."""

from __future__ import annotations

from dataclasses import dataclass


class UnreadableRegex(ValueError):
    """A pattern with a part that this reader does not know."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """One character of a kind."""

    source: str
    folded: bool = False
    """Whatever the case: some characters are then equal to several."""

    @property
    def letter(self) -> bool:
        return self.source.startswith("\\x{")


@dataclass(frozen=True, eq=False)
class Anchor:
    """A place."""


@dataclass(frozen=True, eq=False)
class Look:
    inner: Node
    behind: bool


@dataclass(frozen=True, eq=False)
class Atomic:
    """Left once, never entered again: `(?>...)` and possessive repeats."""

    inner: Node


@dataclass(frozen=True, eq=False)
class Choice:
    branches: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Chain:
    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    inner: Node
    least: int
    most: int | None


Node = Leaf | Anchor | Look | Atomic | Choice | Chain | Repeat
