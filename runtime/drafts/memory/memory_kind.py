"""The draft kind `memory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .memory import MemoryProposer

    return MemoryProposer(draft, decoder)


KIND = DraftKind("memory", _propose, propose_first=_propose, of_requests=1)
