"""The draft kind `vispec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind
from .vispec_options import ADAPTOR, LAYER, VispecOptions

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .vispec import Vispec  # manifests are read without the proposers

    return Vispec(draft, decoder)


KIND = DraftKind("vispec", _propose, (LAYER, ADAPTOR), VispecOptions)
