"""Draft kinds: what proposes tokens to a target, as graphs of a bundle and as folders on disk. One file per kind.

A new kind is its own files, of which one has a `DraftKind`, and one line in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...runtime.bundle.manifest import DraftInfo
    from ..families.common.layer_skip import Sublayers
    from .common.base import DraftKind

KINDS: dict[str, tuple[str, str]] = {
    "imitation": ("imitation.imitation", "ImitationKind"),
    "medusa": ("medusa.medusa", "MedusaKind"),
    "eagle": ("eagle.eagle", "EagleKind"),
    "eagle3": ("eagle.eagle3", "Eagle3Kind"),
    "vispec": ("eagle.vispec", "VispecKind"),
    "mtp": ("eagle.mtp", "MtpKind"),
    "draft-and-verify": ("layer_skip", "DraftAndVerifyKind"),
    "early-exit": ("early_exit", "EarlyExitKind"),
    "prompt-lookup": ("prompt_lookup", "PromptLookupKind"),
}
"""Kind → (module, class), in the order in which a bundle lists its drafts: trained ones first. The names are known
without importing PyTorch, which the modules need."""


def draft_kind(name: str) -> DraftKind:
    """The kind of that name; KeyError for an unknown one."""
    module, attribute = KINDS[name]
    return getattr(import_module(f".{module}", __name__), attribute)()


def draft_kinds() -> list[DraftKind]:
    """All kinds, in the order of `KINDS`."""
    return [draft_kind(name) for name in KINDS]


def left_out(drafts: Iterable[DraftInfo]) -> Sublayers | None:
    """What one of a manifest's drafts leaves out of the target, which the manifest says whole; None where none does."""
    told = (draft_kind(draft.kind).left_out(draft) for draft in drafts if draft.kind in KINDS)
    return next((skip for skip in told if skip is not None), None)


def kinds_written_as(form: str) -> str:
    """Names of the kinds whose drafts have a place in a format of others, for a sentence."""
    return " and ".join(kind.name for kind in draft_kinds() if form in kind.forms)
