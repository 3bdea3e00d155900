"""Memories of earlier answers, made up from the one that is right."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from vlmexport.runtime.drafts.memory.answers import Memory
from vlmexport.runtime.drafts.memory.memory import MemoryProposer
from vlmexport.runtime.speculative.sequence import Sequence


class Remembering(MemoryProposer):
    """With a memory of its own, whatever the request has."""

    def __init__(self, draft: Any, decoder: Any, memory: Memory, shortest: int = 1) -> None:
        super().__init__(draft, decoder, shortest)
        self._memory = memory

    def begin(self, sequence: Sequence) -> None:
        sequence.memory = self._memory
        super().begin(sequence)


def wrong_token(token: int, step: int = 1) -> int:
    """Another ordinary token."""
    return 3 + (token - 3 + 7 * step) % 120


def edited(truth: Items[int]) -> list[list[int]]:
    """Earlier answers: others with words in common, then one with a word changed, one added and one left out."""
    words, third = list(truth), len(truth) // 3
    return [
        [*words[third:], *words[:third]],
        [wrong_token(token) for token in words],
        [token if at % 7 else wrong_token(token) for at, token in enumerate(words)],
        [*words[:third], wrong_token(third), *words[third : 2 * third], *words[2 * third + 1 :]],
    ]


def remembered(answers: Items[Items[int]]) -> Memory:
    """A memory of these answers, the latest last."""
    memory = Memory()
    for answer in answers:
        memory.remember(answer, "tokenizer")
    return memory
