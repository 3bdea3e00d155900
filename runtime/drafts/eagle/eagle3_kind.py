"""The draft kind `eagle3`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind
from .eagle3_options import FUSION, LAYER, Eagle3Options

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .eagle3 import Eagle3  # manifests are read without the proposers

    return Eagle3(draft, decoder)


KIND = DraftKind("eagle3", _propose, (LAYER, FUSION), Eagle3Options)
