"""What commands of this room refuse before they load PyTorch. Each check is also made where the work is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..exporter.common.aliases import check_known
from ..exporter.drafts import KINDS
from ..exporter.drafts.named import NONE
from ..exporter.drafts.named import check_named as check_drafts
from ..exporter.output import check_output
from ..exporter.output.folder import refuse_existing
from ..exporter.quantization.choice import WeightsChoice, parse_weights
from ..runtime.bundle.folder import Bundle
from ..runtime.common.errors import OptionError
from .data.load import check_named
from .data.reading.places import folder_to_stay_in
from .evaluation.quality import open_task


def check_inputs(model: str, data: Sequence[str], inside: Path | None) -> None:
    """Raises OptionError for a model, for data and for a folder to stay in that are names of nothing."""
    check_known(model)
    check_named(data)
    folder_to_stay_in(inside)


def check_evaluation(
    model: str,
    data: Sequence[str],
    drafts: Sequence[str],
    task: str,
    bundle: Path | None,
    inside: Path | None,
) -> None:
    """Raises OptionError, ExportError or BundleError for names of nothing."""
    check_inputs(model, data, inside)
    for draft in drafts:
        if draft == NONE:
            raise OptionError("--draft none: eval measures drafts; leave it out to judge the answers alone")
        if draft.partition("@")[0] not in KINDS:
            check_drafts([draft])
    if task not in ("auto", "none"):
        open_task(task)
    if bundle is not None:
        Bundle.open(bundle)


def check_quantization(
    model: str, data: Sequence[str], inside: Path | None, weights: str, out: Path
) -> WeightsChoice:
    """What `--weights` says. Raises OptionError or ExportError for names of nothing, and for a folder that has something in it."""
    choice = parse_weights(weights)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        refuse_existing(out, "choose another -o")
    check_output(out, False)
    check_inputs(model, data, inside)
    return choice
