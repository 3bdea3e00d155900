"""What `--draft`, `--draft-precision` and folders of drafts must be, as far as that shows without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...runtime.common.errors import ExportError, OptionError
from ...runtime.common.paths import is_folder
from ..common.precisions import INTEGERS
from . import KINDS
from .common.files import DESCRIPTION, draft_folder, read_document

NONE = "none"
PUBLISHED = "config.json"
"""What checkpoints of drafts in other formats have."""


def check_named(wanted: Sequence[str]) -> None:
    """OptionError for a `--draft` that is neither a kind nor a folder, and for `none` beside others; ExportError for a
    folder that holds no draft."""
    if NONE in wanted and len(wanted) > 1:
        raise OptionError("--draft none excludes other drafts")
    for value in wanted:
        if value in KINDS or value == NONE:
            continue
        if not is_folder(value):
            raise OptionError(
                f"--draft {value!r:.200} is neither a kind ({', '.join([*KINDS, NONE])}) nor a folder of a trained draft"
            )
        check_folder(Path(value))


def check_folder(folder: Path) -> None:
    """ExportError for a folder that is missing, that holds nothing of a draft, or whose `draft.json` is not one."""
    own = draft_folder(folder)
    if (own / DESCRIPTION).exists() or not folder.is_dir():
        read_document(own)
    elif not (folder / PUBLISHED).exists():
        raise ExportError(
            f"{folder} is not a draft folder: it has neither {DESCRIPTION}, which vlmexport train writes, nor the {PUBLISHED} "
            "of a published checkpoint"
        )


def check_precisions(wanted: Sequence[str]) -> None:
    """OptionError for a `--draft-precision` that names no type of integers."""
    for value in wanted:
        if value.rpartition("=")[2] not in INTEGERS:
            raise OptionError(f"--draft-precision {value!r:.80} is unknown; choose {' or '.join(INTEGERS)}")
