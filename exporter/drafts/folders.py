"""Trained drafts in folders: this project's own, and checkpoints that others publish."""

from __future__ import annotations

from pathlib import Path

from ...runtime.common.errors import ExportError
from ...runtime.common.paths import is_folder, path_text
from ..common.aliases import Alias
from . import KINDS, draft_kind, draft_kinds, kinds_written_as
from .common.base import Draft
from .common.files import DESCRIPTION, draft_folder, read_document
from .eagle.speculators_format import SPECULATORS, model_type
from .named import check_folder


def open_draft(folder: Path) -> Draft:
    """The trained draft in `folder`, of whatever kind; a training run's folder gives its best one, and checkpoints that
    others publish are read as their kind does.

    Raises:
        ExportError: a file is missing or damaged, or the kind is not one of this version's trained ones.
    """
    if not is_folder(folder):
        raise ExportError(f"{path_text(folder)} is not a draft folder: there is no such folder")
    for draft_format in draft_kinds():
        if draft_format.recognises(folder):
            return draft_format.load(folder)
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


def shipped_drafts(alias: Alias | None) -> list[Draft]:
    """The trained drafts that come with a model of this package."""
    return [] if alias is None else [open_draft(folder) for folder in alias.draft_folders()]
