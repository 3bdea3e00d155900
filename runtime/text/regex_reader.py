"""Reads a regular expression of Oniguruma's syntax, as far as tokenizers use it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .regex_nodes import Anchor, Atomic, Chain, Choice, Leaf, Look, Node, Repeat, UnreadableRegex

_LONGEST = 20_000
_DEEPEST = 20

_REPEAT = re.compile(r"([*+?])([+?]?)|\{(?:(\d{1,6})(?:(,)(\d{0,6}))?|,(\d{1,6}))\}(\??)")
_CHARACTER = re.compile(
    r"\\(?:[dDwWsShHRNOtnrfvae]|[pP]\{\^?[\w \-]+\}|x\{[0-9A-Fa-f]{1,8}\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|0[0-7]{0,2}|[^\w\s]|[ \n\t])",
    re.ASCII,
)
_PLACE = re.compile(r"\\[bBAzZG]|[\^$]")
_GROUP = re.compile(
    r"\?(?:(?P<kind>:|=|!|>|<=|<!)|<[A-Za-z_]\w*>|'[A-Za-z_]\w*'|(?P<flags>[imx]*(?:-[imx]*)?)(?P<end>[:)]))"
)
_COMMENT = re.compile(r"\(\?#(?:\\.|[^\\)])*\)", re.DOTALL)
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")


@dataclass
class RegexReader:
    pattern: str
    at: int = 0
    depth: int = 0
    flags: frozenset[str] = field(default_factory=frozenset)

    def read(self) -> Node:
        if len(self.pattern) > _LONGEST:
            raise UnreadableRegex(f"it has {len(self.pattern)} characters")
        node = self._choice()
        if self.at < len(self.pattern):
            raise self._unknown()
        return node

    def _unknown(self) -> UnreadableRegex:
        return UnreadableRegex(f"its part {self.pattern[self.at : self.at + 10]!r} is not known here")

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.pattern, self.at)
        if match:
            self.at = match.end()
        return match

    def _next(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _skip(self) -> None:
        """Comments."""
        while self._take(_COMMENT):
            pass
        while "x" in self.flags and self._take(re.compile(r"[ \t\n\r\f\v]+|#[^\n]*")):
            self._skip()

    def _choice(self) -> Node:
        branches = [self._chain()]
        while self._next() == "|":
            self.at += 1
            branches.append(self._chain())
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _chain(self) -> Node:
        items: list[Node] = []
        while True:
            self._skip()
            if self._next() in ("", "|", ")"):
                return Chain(tuple(items))
            items.append(self._repeated(self._item()))

    def _repeated(self, node: Node) -> Node:
        self._skip()
        first = self.at
        while match := self._take(_REPEAT):
            if match.start() > first + 20:
                raise UnreadableRegex("it repeats a repeat too often")
            sign, mode, least, comma, most, only_most, lazy = match.groups()
            if sign:
                node = Repeat(node, int(sign == "+"), 1 if sign == "?" else None)
                node = Atomic(node) if mode == "+" else node
            else:  # `{1,2}+` repeats once more in this syntax; `{2}?` may be none or two
                low = int(least or 0)
                high = int(only_most or most or 0) if only_most or most else None if comma else low
                if (high is not None and high < low) or (lazy and not comma and not only_most):
                    raise UnreadableRegex(f"its repeat {match.group()!r} is not known here")
                node = Repeat(node, low, high)
            self._skip()
        return node

    def _item(self) -> Node:
        if self._next() == "(":
            return self._group()
        if self._take(_PLACE):
            return Anchor()
        start = self.at
        if self._next() == "[":
            self._class()
        elif self._next() == "\\":
            if not self._take(_CHARACTER):
                raise self._unknown()
        elif self._next() in "*+?" or _REPEAT.match(self.pattern, self.at):
            raise self._unknown()
        else:
            self.at += 1
        source = self.pattern[start : self.at]
        if len(source) == 1 and source != ".":
            source = f"\\x{{{ord(source):x}}}"
        if "m" in self.flags:
            source = f"(?m:{source})"
        return Leaf(source, "i" in self.flags)

    def _class(self) -> None:
        """Past a class, whose classes inside may be joined and cut."""
        depth = 0
        while True:
            letter = self._next()
            if letter == "\\":
                if not self._take(_CHARACTER) and not self._take(re.compile(r"\\b")):
                    raise self._unknown()
            elif letter == "[" and depth and self.pattern.startswith("[:", self.at):
                if not self._take(_POSIX):
                    raise self._unknown()
            elif letter == "[":
                if re.compile(r"\[\^?\]").match(self.pattern, self.at):
                    raise self._unknown()
                depth += 1
                self.at += 1
            elif letter == "]":
                depth -= 1
                self.at += 1
                if not depth:
                    return
            elif letter:
                self.at += 1
            else:
                raise self._unknown()

    def _group(self) -> Node:
        start, before = self.at, self.flags
        self.at += 1
        kind = None
        if self._next() in ("?", "*"):
            match = self._take(_GROUP)
            if not match:
                self.at = start
                raise self._unknown()
            kind = match["kind"]
            if match["end"]:
                on, _, off = match["flags"].partition("-")
                self.flags = (self.flags | set(on)) - set(off)
                if match["end"] == ")":  # for the whole pattern
                    if start:
                        self.at = start
                        raise self._unknown()
                    return self._choice()
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnreadableRegex(f"its groups are more than {_DEEPEST} deep")
        inner = self._choice()
        if self._next() != ")":
            raise self._unknown()
        self.at += 1
        self.depth -= 1
        self.flags = before
        if kind in ("=", "!", "<=", "<!"):
            return Look(inner, kind.startswith("<"))
        return Atomic(inner) if kind == ">" else inner
