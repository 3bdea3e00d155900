"""What `verify --certificate` counted, as a manifest keeps it."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .schema import Part, checked, integer, number, optional, string


@dataclass(kw_only=True)
class Difference(Part):
    """Where drafted decoding left plain decoding: with which draft, at which token of which request, and by how much the
    two best logits of plain decoding differed there (null: it ends before)."""

    draft: str = checked(string(200))
    draft_length: int = checked(integer(1, 4096))
    draft_nodes: int | None = checked(optional(integer(1, 4096)), default=None)
    request: int = checked(integer(0, 1 << 30))
    token: int = checked(integer(0, 1 << 21))
    margin: float | None = checked(optional(number(0, 1e30)))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Certificate(Part):
    """Drafted against plain decoding on one engine, with no allowance for near-ties: `requests`, each drafted in `ways`, of
    `tokens` in all; how many `different` outputs, the first of them, and the largest margin among them."""

    engine: str = checked(string(100))
    version: str = checked(string(100))
    machine: str = checked(string(200))
    threads: int = checked(integer(1, 4096))
    date: str = checked(string(40))
    requests: int = checked(integer(1, 1 << 30))
    ways: int = checked(integer(1, 1 << 20))
    tokens: int = checked(integer(0, 1 << 53))
    least_width: int = checked(integer(1, 4096), default=1)
    verify_width: int | None = checked(optional(integer(2, 4096)), default=None)
    different: int = checked(integer(0, 1 << 30), default=0)
    first: Difference | None = checked(optional(Difference.parse), default=None)
    largest_margin: float | None = checked(optional(number(0, 1e30)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, str, int]:
        """What it holds for; a later one of the same takes its place."""
        return self.engine, self.machine, self.threads

    def sentence(self) -> str:
        """It in words, for people."""
        counted = f"{self.requests} requests × {self.ways} ways of drafting, {self.tokens:,} tokens"
        where = f"{self.engine} {self.version}, {self.machine}, {self.threads} threads, {self.date[:10]}"
        if self.first is None:
            return f"{counted}, all equal to plain decoding ({where})"
        first = self.first
        shape = f"{first.draft_length} deep" + (
            "" if first.draft_nodes is None else f", trees of {first.draft_nodes}"
        )
        margin = "it ends" if first.margin is None else f"its two best logits differ by {first.margin:.2g}"
        return (
            f"{counted}; {self.different} outputs differ from plain decoding, first with {first.draft} ({shape}) at token "
            f"{first.token} of request {first.request}, where {margin} ({where})"
        )
