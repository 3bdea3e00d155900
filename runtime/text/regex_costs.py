"""Steps of trying every way through a regular expression at one place of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .regex_nodes import Anchor, Atomic, Chain, Choice, Leaf, Look, Node, Repeat, UnreadableRegex

_CLAMP = 10**18
_WIDEST_BEHIND = 100
_ANYTHING = "(?m:.)"


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


@dataclass
class RegexCosts:
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
            costs = [self.of(branch, final, consumed) for branch in node.branches]
            ways = [ways for ways, _ in costs]
            return _largest(ways) if _exclusive(node) else sum(ways, Steps()), sum(
                (steps for _, steps in costs), _ONE
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


_Kind = Callable[[RegexCosts, Node, int, bool, bool], "tuple[Steps, Steps]"]


def _parts(items: tuple[Node, ...]) -> Iterator[tuple[Node, _Kind, int]]:
    """A chain's items, where a repeat is what must be there, then what may be."""
    for item in items:
        if not isinstance(item, Repeat):
            yield item, RegexCosts._all, 1
            continue
        if item.least > 1:
            yield item.inner, RegexCosts._all, item.least - 1
        if item.least:
            yield item.inner, RegexCosts._all, 1
        left = None if item.most is None else item.most - item.least
        if left != 0:
            yield Repeat(item.inner, 0, left), RegexCosts._some, 0


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
        width = 3 if node.folded else 2  # a line's end may be two
    elif isinstance(node, Atomic):
        width = _width(node.inner)
    elif isinstance(node, Choice):
        width = max(map(_width, node.branches))
    elif isinstance(node, Chain):
        width = sum(map(_width, node.items))
    elif isinstance(node, Repeat):
        width = _CLAMP if node.most is None else node.most * _width(node.inner)
    else:
        width = 0
    if width > _WIDEST_BEHIND:
        raise UnreadableRegex(f"it looks behind for more than {_WIDEST_BEHIND} characters")
    return width
