"""Proposers: one file per draft kind, one line per kind here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..bundle.combined_drafts import second_of
from ..common.errors import BundleError

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo
    from ..decoder.decoder import Decoder
    from ..speculative.proposer import Proposer

KINDS = {
    "draft-and-verify": ("layer_skip", "LayerSkip"),
    "eagle": ("eagle.eagle", "Eagle"),
    "eagle3": ("eagle.eagle3", "Eagle3"),
    "early-exit": ("imitation.self_draft", "SelfDraft"),
    "imitation": ("imitation.with_attention", "imitation"),
    "medusa": ("medusa.medusa", "Medusa"),
    "prompt-lookup": ("prompt_lookup.prompt_lookup", "PromptLookup"),
    "vispec": ("eagle.vispec", "Vispec"),
}
"""Draft kind → (module, class, or a function that chooses one). It is called with (draft, decoder), once per session."""


def create(draft: DraftInfo, decoder: Decoder) -> Proposer:
    """The proposer of a draft, or of a combination. Raises `BundleError` for a kind that this version does not know."""
    if second_of(decoder.manifest.drafts, draft.name) is None:
        return _create(draft, decoder)
    from .combined import SHORTEST, FallbackProposer
    from .prompt_lookup.prompt_lookup import PromptLookup

    first = PromptLookup(draft, decoder, shortest=SHORTEST)
    return FallbackProposer(draft.name, first, _create(draft, decoder))


def _create(draft: DraftInfo, decoder: Decoder) -> Proposer:
    if draft.kind not in KINDS:
        raise BundleError(
            f"draft {draft.name!r} is of kind {draft.kind!r}, which this vlmexport cannot run; upgrade it"
        )
    module, name = KINDS[draft.kind]
    return getattr(import_module(f".{module}", __name__), name)(draft, decoder)
