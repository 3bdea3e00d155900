"""How much work a regular expression may take on a text, read from the pattern alone.

The `tokenizers` library matches with Oniguruma, which backtracks and cannot be interrupted. Its work is bounded here as
that of trying every way through the pattern at every place of a text, where a repeat without an end counts as long as
the run of characters that it may stand on. A match ends the search at its place and consumes its text, so repeats
behind which nothing can fail cost one step for each character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import tokenizers

STEPS = 1_000_000_000
"""Steps of all regular expressions over a text, of 1 to 7 ns each where runs are long."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_MARKED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_REST = rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
LINEAR = frozenset({
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    _WORDS % "",  # Qwen2
    _WORDS % "{1,3}",  # Llama 3
    _MARKED,  # Qwen3.5
    _CASED % ((_CONTRACTIONS + "?",) * 2) + _REST % "{1,3}",  # o200k
    _CASED % ("", "") + _REST % "",  # tekken
})  # fmt: skip
"""Published patterns whose last alternatives take the whole run that the ones before them have failed on."""

_CLAMP = 10**18
_LONGEST = 20_000
_DEEPEST = 20
_WIDEST_BEHIND = 100
_SHORT = 16
_ANYTHING = "(?m:.)"


class UnreadableRegex(ValueError):
    """A pattern with a part that this reader does not know."""


@dataclass(frozen=True)
class Steps:
    """A number of steps: `fixed`, and `per_run` for each character of a run; `more` where they multiply further."""

    fixed: int = 0
    per_run: int = 0
    more: bool = False

    def __add__(self, other: Steps) -> Steps:
        return Steps(
            min(_CLAMP, self.fixed + other.fixed),
            min(_CLAMP, self.per_run + other.per_run),
            self.more or other.more,
        )

    def __mul__(self, other: Steps) -> Steps:
        return Steps(
            min(_CLAMP, self.fixed * other.fixed),
            min(_CLAMP, self.fixed * other.per_run + self.per_run * other.fixed),
            self.more or other.more or self.per_run * other.per_run > 0,
        )


_ONE = Steps(1)
_RUN = Steps(1, 1)


@dataclass(frozen=True)
class Work:
    """Steps at one place of a text, and patterns of the characters that runs are made of."""

    steps: Steps
    runs: tuple[str, ...]

    def on(self, size: int, text: str | None) -> int:
        """Steps over a text of at most `size` characters, fewer where the text is known and its runs are short."""
        linear, square = self.steps.fixed * size, self.steps.per_run * size * size
        if square > STEPS // 10 and text is not None:
            square = self.steps.per_run * sum(_squares(characters, text) for characters in self.runs)
        return linear + square


def _squares(characters: str, text: str) -> int:
    """The sum of the squares of the lengths of runs, at most; those below `_SHORT` are not looked for."""
    split = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(f"(?:{characters}){{{_SHORT},}}"), "removed", invert=True
    )
    return _SHORT * len(text) + sum((end - start) ** 2 for _, (start, end) in split.pre_tokenize_str(text))


def work_of(pattern: str) -> Work:
    """The work of a pattern; raises `UnreadableRegex`."""
    node = _Reader(pattern).read()
    costs = _Costs()
    steps = costs.of(node, True, True)[1]
    return Work(Steps(steps.fixed), ()) if pattern in LINEAR else Work(steps, tuple(sorted(costs.runs)))


# --- what a pattern is made of ---


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

# --- reading ---

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
class _Reader:
    pattern: str
    at: int = 0
    depth: int = 0
    flags: frozenset[str] = field(default_factory=frozenset)

    def read(self) -> Node:
        if len(self.pattern) > _LONGEST:
            raise UnreadableRegex(f"it has {len(self.pattern)} characters")
        found = self._choice()
        if self.at < len(self.pattern):
            raise self._unknown()
        return found

    def _unknown(self) -> UnreadableRegex:
        return UnreadableRegex(f"its part {self.pattern[self.at : self.at + 10]!r} is not known here")

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.pattern, self.at)
        if found:
            self.at = found.end()
        return found

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
        while found := self._take(_REPEAT):
            if found.start() > first + 20:
                raise UnreadableRegex("it repeats a repeat too often")
            sign, mode, least, comma, most, only_most, lazy = found.groups()
            if sign:
                node = Repeat(node, int(sign == "+"), 1 if sign == "?" else None)
                node = Atomic(node) if mode == "+" else node
            else:  # `{1,2}+` repeats once more in this syntax; `{2}?` may be none or two
                low = int(least or 0)
                high = int(only_most or most or 0) if only_most or most else None if comma else low
                if (high is not None and high < low) or (lazy and not comma and not only_most):
                    raise UnreadableRegex(f"its repeat {found.group()!r} is not known here")
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
            found = self._take(_GROUP)
            if not found:
                self.at = start
                raise self._unknown()
            kind = found["kind"]
            if found["end"]:
                on, _, off = found["flags"].partition("-")
                self.flags = (self.flags | set(on)) - set(off)
                if found["end"] == ")":  # for the whole pattern
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


# --- what it costs ---


@dataclass
class _Costs:
    runs: set[str] = field(default_factory=set)
    _known: dict[tuple[int, bool, bool], tuple[Steps, Steps]] = field(default_factory=dict)

    def of(self, node: Node, final: bool, consumed: bool) -> tuple[Steps, Steps]:
        """Ways through a part that what follows may have to try, and steps of trying all of them.

        `final`: nothing that follows can fail, so that the first way is the last. `consumed`: then the text is matched,
        and no other place of it is tried.
        """
        key = (id(node), final, consumed)
        if key not in self._known:
            ways, steps = self._of(node, final, consumed)
            self._known[key] = (_ONE if final else ways), steps
        return self._known[key]

    def _of(self, node: Node, final: bool, consumed: bool) -> tuple[Steps, Steps]:
        if isinstance(node, Leaf):
            return Steps(1 if node.letter or not node.folded else 3), _ONE
        if isinstance(node, Anchor):
            return _ONE, _ONE
        if isinstance(node, Look):
            _, steps = self.of(node.inner, True, False)
            return _ONE, steps * Steps(1 + _width(node.inner)) + _ONE if node.behind else steps + _ONE
        if isinstance(node, Atomic):
            return _ONE, self.of(node.inner, True, consumed)[1]
        if isinstance(node, Choice):
            found = [self.of(branch, final, consumed) for branch in node.branches]
            ways = [ways for ways, _ in found]
            return _largest(ways) if _exclusive(node) else sum(ways, Steps()), sum(
                (steps for _, steps in found), _ONE
            )
        if isinstance(node, Chain):
            return self._chain(node, final, consumed)
        return self._chain(Chain((node,)), final, consumed)

    def _chain(self, node: Chain, final: bool, consumed: bool) -> tuple[Steps, Steps]:
        parts = list(_parts(node.items))
        last = max((i for i, (item, _, least) in enumerate(parts) if least and _can_fail(item)), default=-1)
        ways, steps = _ONE, _ONE
        for i, (item, kind, least) in enumerate(parts):
            end, eaten = (final, consumed) if i >= last else (False, False)
            before = _ONE if final and i > last else ways
            its_ways, its_steps = kind(self, item, least, end, eaten)
            steps += before * its_steps
            ways *= its_ways
        return ways, steps

    def _all(self, inner: Node, times: int, final: bool, consumed: bool) -> tuple[Steps, Steps]:
        """`inner` that many times."""
        if times == 1:
            return self.of(inner, final, consumed)
        ways, steps = self.of(inner, False, False)
        return _times(ways, steps, times)

    def _some(self, repeat: Node, _: int, final: bool, consumed: bool) -> tuple[Steps, Steps]:
        """As often as it matches, up to `most` of a repeat; this cannot fail."""
        assert isinstance(repeat, Repeat)
        inner, most = repeat.inner, repeat.most
        ways, steps = self.of(inner, final, consumed)
        if final and consumed:  # each time eats a character
            longer = steps * Steps(0, 1) if steps.per_run or steps.more else Steps()
            return _ONE, steps * Steps(2) + longer
        if most is not None:
            if final:
                return _ONE, steps * Steps(most)
            return _tries(ways, steps, most)
        self.runs.add(_characters(inner))
        if not final and ways != _ONE:
            return Steps(1, 1, True), Steps(1, 1, True)
        return _RUN, steps * _RUN


_Kind = Callable[[_Costs, Node, int, bool, bool], "tuple[Steps, Steps]"]


def _parts(items: tuple[Node, ...]) -> Iterator[tuple[Node, _Kind, int]]:
    """A chain's items, where a repeat is what must be there, then what may be."""
    for item in items:
        if not isinstance(item, Repeat):
            yield item, _Costs._all, 1
            continue
        if item.least > 1:
            yield item.inner, _Costs._all, item.least - 1
        if item.least:
            yield item.inner, _Costs._all, 1
        left = None if item.most is None else item.most - item.least
        if left != 0:
            yield Repeat(item.inner, 0, left), _Costs._some, 0


def _times(ways: Steps, steps: Steps, times: int) -> tuple[Steps, Steps]:
    if ways == _ONE:
        return _ONE, steps * Steps(times)
    reached, made = _ONE, Steps()
    for _ in range(min(times, 100)):  # by then, two ways are 10**30
        made += reached * steps
        reached *= ways
    return reached, made


def _tries(ways: Steps, steps: Steps, most: int) -> tuple[Steps, Steps]:
    if ways == _ONE:
        return Steps(most + 1), steps * Steps(most)
    reached, all_ways, made = _ONE, _ONE, Steps()
    for _ in range(min(most, 100)):
        made += reached * steps
        reached *= ways
        all_ways += reached
    return all_ways, made


def _largest(steps: list[Steps]) -> Steps:
    return Steps(max(s.fixed for s in steps), max(s.per_run for s in steps), any(s.more for s in steps))


def _exclusive(node: Choice) -> bool:
    """Whether no two branches can begin at one place."""
    heads = [
        branch.items[0] if isinstance(branch, Chain) and branch.items else None for branch in node.branches
    ]
    letters = {head.source for head in heads if isinstance(head, Leaf) and head.letter and not head.folded}
    return len(letters) == len(heads)


def _can_fail(node: Node) -> bool:
    if isinstance(node, Atomic):
        return _can_fail(node.inner)
    if isinstance(node, Choice):
        return all(map(_can_fail, node.branches))
    if isinstance(node, Chain):
        return any(map(_can_fail, node.items))
    return not isinstance(node, Repeat) or (node.least > 0 and _can_fail(node.inner))


def _characters(node: Node) -> str:
    """A pattern of every character that may be in a part."""
    leaves = {leaf.source: leaf.folded for leaf in _leaves(node)}
    return _ANYTHING if any(leaves.values()) or not leaves else "|".join(sorted(leaves))


def _leaves(node: Node) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, Atomic | Repeat):
        yield from _leaves(node.inner)
    elif isinstance(node, Choice | Chain):
        for part in node.branches if isinstance(node, Choice) else node.items:
            yield from _leaves(part)


def _width(node: Node) -> int:
    """Characters that a part may cover; raises `UnreadableRegex` for a look-behind without an end."""
    if isinstance(node, Leaf):
        found = 3 if node.folded else 2  # a line's end may be two
    elif isinstance(node, Atomic):
        found = _width(node.inner)
    elif isinstance(node, Choice):
        found = max(map(_width, node.branches))
    elif isinstance(node, Chain):
        found = sum(map(_width, node.items))
    elif isinstance(node, Repeat):
        found = _CLAMP if node.most is None else node.most * _width(node.inner)
    else:
        found = 0
    if found > _WIDEST_BEHIND:
        raise UnreadableRegex(f"it looks behind for more than {_WIDEST_BEHIND} characters")
    return found
