"""Plain decoding in place of an oracle, for engines that round each row to 8 bits in front of integer weights: transformers has
no such arithmetic, and what drafts must not change are the tokens that the engine gives without them."""

from __future__ import annotations

from tests.support import lossless
from tests.support.oracle import NEVER, Request
from tests.support.rig import Rig


class PlainDecoding:
    """One sequence at a time on a rig of its own, no drafts."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._known: dict[tuple[Request, int, int], tuple[int, ...]] = {}

    def greedy(self, request: Request, count: int, eos: int = NEVER) -> tuple[int, ...]:
        """As `Oracle.greedy`."""
        key = (request, count, eos)
        if key not in self._known:
            self._known[key] = lossless.generate(self.rig, request, count, eos=(eos,)).tokens
        return self._known[key]
