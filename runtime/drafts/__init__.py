"""Draft kinds: what each declares, and its proposer. A new kind is its own files and one line here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..bundle.combined_drafts import parts_of
from ..common.errors import BundleError
from ..graphs.registry import draft_kinds

if TYPE_CHECKING:
    from ..bundle.draft_kind import DraftKind
    from ..bundle.manifest import DraftInfo
    from ..decoder.decoder import Decoder
    from ..speculative.proposer import Proposer

KINDS = {
    "draft-and-verify": "layer_skip_kind",
    "eagle": "eagle.eagle_kind",
    "eagle3": "eagle.eagle3_kind",
    "early-exit": "imitation.early_exit_kind",
    "grammar": "grammar.grammar_kind",
    "imitation": "imitation.imitation_kind",
    "medusa": "medusa.medusa_kind",
    "memory": "memory.memory_kind",
    "mtp": "eagle.mtp_kind",
    "prompt-lookup": "prompt_lookup.prompt_lookup_kind",
    "vispec": "eagle.vispec_kind",
}
"""Draft kind → the module that declares it, a `DraftKind` called `KIND`. Such modules are light: every manifest that is
read asks them (`graphs/registry.py`)."""


def create(draft: DraftInfo, decoder: Decoder) -> Proposer:
    """The proposer of a draft, or of a combination. Raises `BundleError` for a kind that this version does not know."""
    parts = parts_of(decoder.manifest.drafts, draft.name)
    if parts is None:
        return _kind(draft).propose(draft, decoder)
    from .combined import FallbackProposer

    first, second = parts
    propose_first = _kind(first).propose_first
    assert propose_first is not None, "a combination begins with a draft that may come first"
    return FallbackProposer(
        draft.name, propose_first(replace(first, name=draft.name), decoder), create(second, decoder)
    )


def _kind(draft: DraftInfo) -> DraftKind:
    kind = draft_kinds().get(draft.kind)
    if kind is None:
        raise BundleError(
            f"draft {draft.name!r} is of kind {draft.kind!r}, which this vlmexport cannot run; upgrade it"
        )
    return kind
