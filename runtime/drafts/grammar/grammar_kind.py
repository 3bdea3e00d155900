"""The draft kind `grammar`: proposes what the grammar of a request forces. No network, no graph; every bundle has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .forced import ForcedTokens

    return ForcedTokens(draft.name)


# Behind a memory: how an earlier answer went on is more than what is forced.
KIND = DraftKind("grammar", _propose, propose_first=_propose, of_requests=2)
