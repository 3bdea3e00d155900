"""Draft kinds: what proposes tokens to a target, as graphs of a bundle and as folders on disk. One file per kind.

A new kind is a file with a `DraftKind` and one line in `KINDS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .common.base import DraftKind

KINDS: dict[str, tuple[str, str]] = {
    "imitation": ("imitation.imitation", "ImitationKind"),
    "medusa": ("medusa.medusa", "MedusaKind"),
    "eagle": ("eagle.eagle", "EagleKind"),
    "eagle3": ("eagle.eagle3", "Eagle3Kind"),
    "vispec": ("eagle.vispec", "VispecKind"),
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
