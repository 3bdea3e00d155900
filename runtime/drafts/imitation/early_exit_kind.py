"""The draft kind `early-exit`: the imitation's proposer without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .self_draft import SelfDraft

    return SelfDraft(draft, decoder)


KIND = DraftKind("early-exit", _propose)
