"""The draft kind `prompt-lookup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer

SHORTEST_FIRST = 2
"""Tokens that must have stood before where another draft could be asked. After a single one a trained draft is right
more often: `benchmarks/combination.py`."""


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .prompt_lookup import PromptLookup

    return PromptLookup(draft, decoder)


def _propose_first(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .prompt_lookup import PromptLookup

    return PromptLookup(draft, decoder, shortest=SHORTEST_FIRST)


KIND = DraftKind("prompt-lookup", _propose, propose_first=_propose_first)
