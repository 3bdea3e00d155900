"""How much the words of a caption tell about the next word, without any picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

_START = -1


class NgramModel:
    """Interpolated (Witten-Bell) n-gram model over token ids."""

    def __init__(self, texts: Sequence[Sequence[int]], order: int = 5) -> None:
        self.order = order
        self.counts: list[dict[tuple[int, ...], Counter[int]]] = [{} for _ in range(order)]
        self.vocabulary = {t for text in texts for t in text}
        for text in texts:
            padded = [_START] * (order - 1) + list(text)
            for at in range(order - 1, len(padded)):
                for length in range(order):
                    context = tuple(padded[at - length : at])
                    self.counts[length].setdefault(context, Counter())[padded[at]] += 1

    def probability(self, context: Sequence[int], token: int) -> float:
        """P(token | context); the uniform distribution is the last resort."""
        p = 1.0 / (len(self.vocabulary) + 1)
        for length in range(self.order):
            seen = self.counts[length].get(tuple(context[len(context) - length :]))
            if seen:
                total, types = seen.total(), len(seen)
                p = (seen[token] + types * p) / (total + types)
        return p

    def perplexity(self, texts: Sequence[Sequence[int]]) -> float:
        """Perplexity per token over ``texts``."""
        nats, tokens = 0.0, 0
        for text in texts:
            padded = [_START] * (self.order - 1) + list(text)
            for at in range(self.order - 1, len(padded)):
                nats -= math.log(self.probability(padded[at - self.order + 1 : at], padded[at]))
                tokens += 1
        return math.exp(nats / tokens)


def prompt_lookup_tau(
    prompt: Sequence[int], text: Sequence[int], ngram: int = 3, proposals: int = 5
) -> float:
    """Mean tokens per verification step if prompt lookup alone drafted ``text`` after ``prompt``."""
    history, done, cycles = list(prompt), 0, 0
    while done < len(text):
        guess = _lookup(history, ngram, proposals)
        accepted = 0
        while accepted < min(len(guess), len(text) - done - 1) and guess[accepted] == text[done + accepted]:
            accepted += 1
        history += text[done : done + accepted + 1]
        done += accepted + 1
        cycles += 1
    return done / cycles if cycles else 1.0


def _lookup(history: list[int], ngram: int, proposals: int) -> list[int]:
    """The continuation of the latest earlier match, trying long patterns before short ones."""
    for length in range(min(ngram, len(history) - 1), 0, -1):
        tail = history[-length:]
        for at in range(len(history) - length - 1, -1, -1):
            if history[at : at + length] == tail:
                return history[at + length : at + length + proposals]
    return []
