"""Where a text stands in the answers that are remembered, and how it went on there.

Two ways to know that: the longest end of the text that stands in an answer (as suffix decoding, arXiv 2411.04975, here
over few answers, so that a list of where each token stands does for a suffix tree); and, where nothing matches, the place in
the answer that was followed last, as if one word had been changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from ...speedup.budget import Budget
from .answers import START, Corpus

NEAR = 8
"""Tokens between the followed place and one where a single token matches again, behind words that were added or left out."""
MOST_PLACES = 64
"""Places that are followed at once, the latest answers' first: older ones are believed 2 ** −64 of those."""
ROOT = -1


class Recall:
    """One text against a corpus. `push` takes about a microsecond where the text goes on as an answer, ten where it does not.

    `shortest`: how many tokens must match for anything to be proposed; with 1 the followed place is proposed where
    nothing matches. `barred` ids and ids outside 0..`vocab_size` − 1 are never proposed; `ends` are ids that nothing follows.
    """

    def __init__(
        self,
        corpus: Corpus,
        shortest: int = 1,
        *,
        barred: Collection[int] = (),
        ends: Collection[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        self._corpus, self._tokens = corpus, corpus.listed
        self._shortest, self._barred, self._ends = shortest, frozenset(barred), frozenset(ends)
        self._most = vocab_size
        self._text = [START]
        self._followed = 0 if len(self._tokens) > 1 else None
        self.longest: int  # tokens at the text's end that stand somewhere; that it begins counts for one
        self._places: list[int]  # where those end
        self._search()

    def __len__(self) -> int:
        """Tokens of the text so far."""
        return len(self._text) - 1

    def push(self, token: int) -> None:
        """The text goes on with a token."""
        tokens, end = self._tokens, len(self._tokens) - 1
        self._text.append(token)
        # What matches n tokens now matched n − 1 before: where any of the longest goes on, no other is as long.
        on = [at + 1 for at in self._places if at < end and tokens[at + 1] == token]
        if on:
            self._places = on
            self.longest += 1
        else:
            self._search()
        if self._shortest <= 1:  # else nothing is proposed by it
            self._follow(token)

    def places(self) -> list[int]:
        """Places where the text may stand, the latest answer's first; none where nothing is known."""
        if self.longest >= max(2, self._shortest):
            return self._places
        return [self._followed] if self._shortest <= 1 and self._followed is not None else []

    def chain(self, depth: int) -> list[int]:
        """At most `depth` tokens: at each step the one that the answers of these places, as far as they still agree, are
        believed most to go on with."""
        found: list[int] = []
        places = self.places()
        while len(found) < depth:
            following = self._following(places)
            if not following:
                break
            token, (_, places) = max(following.items(), key=lambda each: each[1][0])
            found.append(token)
            if token in self._ends:
                break
        return found

    def tree(self, budget: Budget) -> tuple[list[int], list[int]]:
        """(tokens, parents) within the budget; parents −1 hang below the text's last token. A budget of a chain gets
        `chain`, another the likeliest nodes: those on the path that is believed most, first."""
        if budget.nodes <= budget.depth:
            chain = self.chain(budget.nodes)
            return chain, list(range(-1, len(chain) - 1))
        tokens: list[int] = []
        parents: list[int] = []
        waiting: list[tuple[float, int, int, int, int, list[int]]] = []
        counter = 0

        def offer(parent: int, depth: int, believed: float, places: list[int]) -> None:
            nonlocal counter
            following = self._following(places)
            whole = sum(weight for weight, _ in following.values())
            for token, (weight, there) in following.items():
                # Ties go to what was offered first, and to the deeper node after it.
                heapq.heappush(waiting, (-believed * weight / whole, counter, parent, depth, token, there))
                counter += 1

        offer(ROOT, 1, 1.0, self.places())
        while waiting and len(tokens) < budget.nodes:
            believed, _, parent, depth, token, there = heapq.heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            if depth < budget.depth and token not in self._ends:
                offer(len(tokens) - 1, depth + 1, -believed, there)
        return tokens, parents

    def _following(self, places: list[int]) -> dict[int, tuple[float, list[int]]]:
        """Token → (what the answers that go on with it are believed together, their places of it)."""
        following: dict[int, tuple[float, list[int]]] = {}
        tokens, weights = self._tokens, self._corpus.weights
        for place in places:
            at = place + 1
            if at >= len(tokens):
                continue
            token = tokens[at]
            if token == START or token in self._barred or (self._most is not None and token >= self._most):
                continue
            weight, there = following.get(token, (0.0, []))
            there.append(at)
            following[token] = weight + float(weights[at]), there
        return following

    def _search(self) -> None:
        """The longest end of the text that stands anywhere, and where."""
        text, tokens, length = self._text, self._corpus.tokens, 0
        found = places = self._corpus.places(text[-1])
        while len(places):
            length, found = length + 1, places
            if length == len(text):
                break
            places = places[tokens[places - length] == text[-1 - length]]
        self.longest, self._places = length, found[:MOST_PLACES].tolist()

    def _follow(self, token: int) -> None:
        """Move the followed place on: to the longest match, to a single one nearby, or by one token."""
        followed, longest, tokens = self._followed, self.longest, self._tokens
        on = None if followed is None or followed + 1 >= len(tokens) else followed + 1
        if on is not None and tokens[on] == token and (longest == 1 or on in self._places):
            self._followed = on
        elif longest >= 2:
            self._followed = self._places[0]
        elif followed is not None:
            near = self._near(followed, token) if longest == 1 else None
            ended = on is None or on + 1 >= len(tokens) or tokens[on] == START
            self._followed = near if near is not None else None if ended else on

    def _near(self, followed: int, token: int) -> int | None:
        """The place nearest to where the text would stand, in the same answer, whose token is the text's last one."""
        tokens, first = self._tokens, max(1, followed + 1 - NEAR)
        window = range(first, min(len(tokens), followed + 2 + NEAR))
        places = [
            at
            for at in window
            if tokens[at] == token and START not in tokens[min(at, followed) + 1 : max(at, followed)]
        ]
        return min(places, key=lambda at: abs(at - followed - 1), default=None)
