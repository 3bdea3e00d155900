"""Draft kinds: what proposes tokens to a target, as graphs of a bundle and as folders on disk. One file per kind.

A new kind is its own files, of which one has a `DraftKind`, and one line in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.common.errors import ExportError
from ...runtime.common.paths import is_folder, path_text

if TYPE_CHECKING:
    from ...runtime.bundle.manifest import DraftInfo
    from ..common.aliases import Alias
    from ..families.common.layer_skip import Sublayers
    from .common.base import Draft, DraftKind

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


def open_draft(folder: Path) -> Draft:
    """The trained draft in `folder`, of whatever kind; a training run's folder gives its best one, and checkpoints that
    others publish are read as their kind does.

    Raises:
        ExportError: a file is missing or damaged, or the kind is not one of this version's trained ones.
    """
    from .common.files import DESCRIPTION, draft_folder, read_document
    from .eagle.speculators_format import SPECULATORS, model_type
    from .named import check_folder

    if not is_folder(folder):
        raise ExportError(f"{path_text(folder)} is not a draft folder: there is no such folder")
    for found in draft_kinds():
        if found.recognises(folder):
            return found.load(folder)
    if not (folder / DESCRIPTION).exists() and (other := model_type(folder)) is not None:
        raise ExportError(
            f"{folder} is a checkpoint of speculators of type {other!r}; this version reads {kinds_written_as(SPECULATORS)}"
        )
    check_folder(folder)
    folder = draft_folder(folder)
    name = read_document(folder)["kind"]
    kind = draft_kind(name) if name in KINDS else None
    if kind is None or not kind.trained:
        known = ", ".join(k.name for k in draft_kinds() if k.trained)
        raise ExportError(f"{folder} holds a draft of kind {name!r:.80}; this version knows {known}")
    return kind.load(folder)


def kinds_written_as(form: str) -> str:
    """Names of the kinds whose drafts have a place in a format of others, for a sentence."""
    return " and ".join(kind.name for kind in draft_kinds() if form in kind.forms)


def left_out(drafts: Iterable[DraftInfo]) -> Sublayers | None:
    """What one of a manifest's drafts leaves out of the target, which the manifest says whole; None where none does."""
    told = (draft_kind(draft.kind).left_out(draft) for draft in drafts if draft.kind in KINDS)
    return next((skip for skip in told if skip is not None), None)


def shipped_drafts(alias: Alias | None) -> list[Draft]:
    """The trained drafts that come with a model of this package."""
    return [] if alias is None else [open_draft(folder) for folder in alias.draft_folders()]
