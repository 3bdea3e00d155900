"""What followed the last tokens when they stood in the text before: an index of n-grams that grows token by token.

Prompt lookup decoding (apoorvumang/prompt-lookup-decoding; the same idea as LLMA, arXiv 2304.04487): answers repeat
parts of their prompt and of themselves. Where the longest suffix of the text occurred before, what came after it
there is proposed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ...speedup.budget import Budget

Path = list[int]


class NgramIndex:
    """N-grams of `shortest`..`longest` tokens over one text, each with the places after its `keep` latest occurrences.

    `push` takes constant time; memory is `longest − shortest + 1` entries per token. `barred` ids (image
    placeholders) and ids outside 0..`vocab_size` − 1 break the text: no n-gram spans them and none is proposed.
    `ends` are ids that nothing follows (end tokens): a continuation stops after one.
    """

    def __init__(
        self,
        longest: int = 3,
        shortest: int = 1,
        *,
        keep: int = 8,
        barred: Collection[int] = (),
        ends: Collection[int] = (),
        vocab_size: int | None = None,
    ):
        if not 1 <= shortest <= longest or keep < 1:
            raise ValueError(f"n-grams of {shortest}..{longest} tokens, {keep} places each: that is no index")
        self._lengths = range(longest, shortest - 1, -1)
        self._keep, self._barred, self._ends = keep, frozenset(barred), frozenset(ends)
        self._most = vocab_size
        self._text: list[int] = []
        self._start = 0  # of the unbroken run that ends the text
        self._places: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        """Tokens pushed."""
        return len(self._text)

    def push(self, token: int) -> None:
        """Append a token. The n-grams that end just before it get their continuation, which starts here."""
        text, at = self._text, len(self._text)
        text.append(token)
        if not self._proposable(token):
            self._start = at + 1
            return
        run = at - self._start
        for length in self._lengths:
            if length <= run:
                key = tuple(text[at - length : at])
                places = self._places.get(key)
                if places is None:
                    self._places[key] = [at]
                else:
                    places.append(at)
                    if len(places) > self._keep:
                        del places[0]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens in order."""
        for token in tokens:
            self.push(token)

    def places(self) -> Iterator[int]:
        """Where the text went on after an earlier occurrence of its suffix: of the longest suffix first, the latest
        occurrence first; a place is named once."""
        text, at = self._text, len(self._text)
        run, seen = at - self._start, set()
        for length in self._lengths:
            if length <= run:
                for place in reversed(self._places.get(tuple(text[at - length :]), ())):
                    if place not in seen:
                        seen.add(place)
                        yield place

    def chain(self, depth: int) -> Path:
        """At most `depth` tokens that followed the latest occurrence of the longest suffix; empty when it is new."""
        place = next(self.places(), None)
        return [] if place is None else self._read(place, depth)

    def tree(self, budget: Budget) -> tuple[list[int], list[int]]:
        """(tokens, parents) of the continuations within the budget: parents −1 hang below the text's last token.

        Continuations are added in the order of `places` until the nodes are used up. They share what they have in
        common, so the children of a node are distinct. A budget of a chain takes the first continuation alone.
        """
        if budget.nodes <= budget.depth:
            tokens = self.chain(budget.nodes)
            return tokens, list(range(-1, len(tokens) - 1))
        tokens, parents = [], []
        nodes: dict[tuple[int, int], int] = {}
        for place in self.places():
            node = -1
            for token in self._read(place, budget.depth):
                child = nodes.get((node, token))
                if child is None:
                    if len(tokens) == budget.nodes:
                        return tokens, parents
                    child = nodes[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return tokens, parents

    def _read(self, place: int, depth: int) -> Path:
        """The text from `place` on. Past its end it reads what it just wrote, so that a period goes on (LZ77)."""
        text, taken = self._text, []
        for offset in range(place, place + depth):
            token = text[offset] if offset < len(text) else taken[offset - len(text)]
            if not self._proposable(token):
                break
            taken.append(token)
            if token in self._ends:
                break
        return taken

    def _proposable(self, token: int) -> bool:
        return token not in self._barred and token >= 0 and (self._most is None or token < self._most)
