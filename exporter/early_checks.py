"""What a command refuses before it loads PyTorch: options, places and names. Each check is also made where the work is done.

Nothing here needs PyTorch or transformers, whose import takes longer than all of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.common.errors import OptionError
from .common.adapter_names import check_adapter, check_merged
from .common.aliases import check_known
from .drafts.named import check_folder, check_named, check_precisions
from .output import check_output
from .output.folder import refuse_existing

if TYPE_CHECKING:
    from .pipeline.request import BuildRequest

FORMS = ("speculators", "eagle", "medusa")
"""Formats of exported drafts."""


def check_build(request: BuildRequest, write: bool = True) -> None:
    """Raises OptionError or ExportError for a request that no model could be built with; without `write` the output is
    not looked at."""
    request.check()
    if write:
        check_output(request.output, request.force)
    check_known(request.model)
    check_named(request.drafts)
    check_precisions(request.draft_precision)
    check_adapter(request.adapter)
    if request.backend is not None:
        from .tensorrt.options import PlanOptions, resolve

        options = PlanOptions(request.backend, request.plan_target, request.plan_precision, request.lowering)
        resolve(options, source=request.precision)


def check_verify(bundle: Path, model: str, drafts: Sequence[str], adapter: str | None = None) -> None:
    """Raises BundleError, OptionError or ExportError for what cannot be compared."""
    from ..runtime.bundle.folder import Bundle

    check_merged(Bundle.open(bundle).manifest.model, adapter)
    check_adapter(adapter)
    check_known(model)
    for draft in drafts:
        check_folder(Path(draft))


def check_export(draft: Path, output: Path, form: str, model: str | None) -> None:
    """Raises OptionError or ExportError for a draft that cannot be written so, or there."""
    if form not in FORMS:
        raise OptionError(f"--format {form!r} is unknown; choose one of {', '.join(FORMS)}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        refuse_existing(output, "choose another -o")
    check_output(output, False)
    check_folder(draft)
    if model is not None:
        check_known(model)
