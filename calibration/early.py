"""What `eval` refuses before it loads PyTorch. Each check is also made where the work is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..exporter.aliases import check_known
from ..exporter.cli.progress import tell_loading
from ..exporter.drafts import KINDS
from ..exporter.drafts.named import check_folder
from ..runtime.bundle.folder import Bundle
from .data.load import check_named
from .evaluation.quality import open_task


def check_evaluation(
    model: str, data: Sequence[str], drafts: Sequence[str], task: str, bundle: Path | None
) -> None:
    """Raises OptionError, ExportError or BundleError for names of nothing; says that PyTorch comes next."""
    check_known(model)
    check_named(data)
    for draft in drafts:
        if draft.partition("@")[0] not in KINDS:
            check_folder(Path(draft))
    if task not in ("auto", "none"):
        open_task(task)
    if bundle is not None:
        Bundle.open(bundle)
    tell_loading()
