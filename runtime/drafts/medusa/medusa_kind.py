"""The draft kind `medusa`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind
from .medusa_options import HEADS, MedusaOptions

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .medusa import Medusa  # manifests are read without the proposers

    return Medusa(draft, decoder)


KIND = DraftKind("medusa", _propose, (HEADS,), MedusaOptions)
