"""The draft kind `memory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer

SHORTEST_FIRST = 2
"""Tokens that must match where another draft could be asked; that an answer begins counts for one."""


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .memory import MemoryProposer

    return MemoryProposer(draft, decoder)


def _propose_first(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .memory import MemoryProposer

    return MemoryProposer(draft, decoder, SHORTEST_FIRST)


KIND = DraftKind("memory", _propose, propose_first=_propose_first, of_requests=1)
