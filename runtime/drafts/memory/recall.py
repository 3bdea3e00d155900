"""Where a text stands in the answers that are remembered, and how it went on there.

Two ways to know that: the longest end of the text that stands in an answer (as suffix decoding, arXiv 2411.04975, here
over few answers, so that comparing all places with each new token is cheaper than a suffix tree); and, where nothing
matches, the place in the answer that was followed last, as if one word had been changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

import numpy as np

from ...speedup.budget import Budget
from .answers import START, Corpus

NEAR = 8
"""Tokens between the followed place and one where a single token matches again, behind words that were added or left out."""
ROOT = -1


class Recall:
    """One text against a corpus. `push` compares a token with every place: a few microseconds for 4,096 tokens.

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
        self._tokens, self._weights = corpus.tokens, corpus.weights
        self._shortest, self._barred, self._ends = shortest, frozenset(barred), frozenset(ends)
        self._most = vocab_size
        # How many tokens up to each place are the text's last ones; that a text begins counts for one.
        self._matched = (self._tokens == START).astype(np.int64)
        self._followed = 0 if len(self._tokens) > 1 else None
        self._length = 0

    def __len__(self) -> int:
        """Tokens of the text so far."""
        return self._length

    def push(self, token: int) -> None:
        """The text goes on with a token."""
        tokens, before = self._tokens, self._matched
        matched = np.zeros_like(before)
        np.multiply(before[:-1] + 1, tokens[1:] == token, out=matched[1:])
        self._matched, self._length = matched, self._length + 1
        self._follow(token)

    def places(self) -> np.ndarray:
        """int64 [k]: places where the text may stand, the latest answer's first; none where nothing is known."""
        longest = int(self._matched.max())
        if longest >= max(2, self._shortest):
            return np.flatnonzero(self._matched == longest)
        if self._shortest <= 1 and self._followed is not None:
            return np.array([self._followed])
        return np.zeros(0, np.int64)

    @property
    def longest(self) -> int:
        """Tokens that match at `places`, that a text begins included."""
        return int(self._matched.max())

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
        waiting: list[tuple[float, int, int, int, int, np.ndarray]] = []
        counter = 0

        def offer(parent: int, depth: int, believed: float, places: np.ndarray) -> None:
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

    def _following(self, places: np.ndarray) -> dict[int, tuple[float, np.ndarray]]:
        """Token → (what the answers that go on with it are believed together, their places of it)."""
        following: dict[int, tuple[float, list[int]]] = {}
        for place in places.tolist():
            at = place + 1
            if at >= len(self._tokens):
                continue
            token = int(self._tokens[at])
            if token == START or token in self._barred or (self._most is not None and token >= self._most):
                continue
            weight, there = following.get(token, (0.0, []))
            there.append(at)
            following[token] = weight + float(self._weights[at]), there
        return {token: (weight, np.array(there)) for token, (weight, there) in following.items()}

    def _follow(self, token: int) -> None:
        """Move the followed place on: to the longest match, to a single one nearby, or by one token."""
        followed, matched = self._followed, self._matched
        longest = int(matched.max())
        if followed is not None and followed + 1 < len(matched) and matched[followed + 1] == longest > 0:
            self._followed = followed + 1
        elif longest >= 2:
            self._followed = int(np.flatnonzero(matched == longest)[0])
        elif followed is not None:
            near = self._near(followed) if longest == 1 else None
            on = followed + 1
            ended = on + 1 >= len(matched) or self._tokens[on] == START
            self._followed = near if near is not None else None if ended else on

    def _near(self, followed: int) -> int | None:
        """The place nearest to where the text would stand, in the same answer, whose token is the text's last one."""
        tokens, first = self._tokens, max(1, followed + 1 - NEAR)
        window = range(first, min(len(tokens), followed + 2 + NEAR))
        places = [
            at
            for at in window
            if self._matched[at] and START not in tokens[min(at, followed) + 1 : max(at, followed)]
        ]
        return min(places, key=lambda at: abs(at - followed - 1), default=None)
