"""The draft kind `draft-and-verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..bundle.draft_kind import DraftKind
from .layer_skip_options import SKIPPED, SkipOptions

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo
    from ..decoder.decoder import Decoder
    from ..speculative.proposer import Proposer


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .layer_skip import LayerSkip  # manifests are read without the proposers

    return LayerSkip(draft, decoder)


KIND = DraftKind("draft-and-verify", _propose, (SKIPPED,), SkipOptions)
