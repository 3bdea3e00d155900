"""`vlmexport verify`: checksums, identity, parity with PyTorch, and losslessness of every draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.bundle.certificate import Certificate
from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest_changes import store_certificate
from ...runtime.common.errors import ExportError
from ...runtime.families import FAMILIES
from ..checkpoint import Checkpoint, fingerprint, open_checkpoint
from ..common.adapter_names import check_merged
from ..common.memory import return_large_buffers
from ..drafts import left_out
from ..drafts.common.base import Draft
from ..drafts.folders import open_draft, shipped_drafts
from ..families.common.matrices import round_weights
from ..families.registry import family_for
from . import check_parity
from .certificate import certificate_failures, certify
from .losslessness import LosslessRow, check_losslessness, failures


@dataclass
class VerifyReport:
    """The outcome. `failures` are sentences; none means verified. `notes` say what could not be compared."""

    bundle: str
    model: str
    files_checked: int = 0
    parity: list[dict[str, Any]] = field(default_factory=list)
    lossless: list[LosslessRow] = field(default_factory=list)
    certificate: Certificate | None = None
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything that was compared agrees."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "bundle": self.bundle, "model": self.model, "ok": self.ok, "files_checked": self.files_checked,
            "parity": self.parity, "lossless": [row.to_dict() for row in self.lossless],
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
            "failures": self.failures, "notes": self.notes,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """How losslessness and parity are checked."""

    prompts: int = 3
    """Requests of losslessness."""
    max_new_tokens: int = 24
    """Of each."""
    images: Sequence[Any] = ()
    """What `Session.generate` takes, in place of generated ones."""
    parity_memory: int | None = None
    """Bytes of parameters from which parity goes layer by layer; None: when they would not fit."""
    device: str = "cpu"
    """Of losslessness, as `Session.load` has it. Parity is a CPU's."""
    certificate: int | None = None
    """Requests of a certificate, which the bundle's manifest keeps; None: none is made."""


def verify_bundle(
    folder: Path,
    model: str,
    draft_folders: Sequence[Path] = (),
    settings: VerifySettings | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    adapter: str | None = None,
) -> VerifyReport:
    """Checks a bundle against the model it was built from. Raises BundleError for a bundle that cannot be opened and
    OptionError for an unknown model; differences are reported, not raised. `adapter`: as `open_checkpoint` takes it."""
    settings = settings or VerifySettings()
    return_large_buffers()
    bundle = Bundle.open(folder)
    check_merged(bundle.manifest.model, adapter)
    report = VerifyReport(str(folder), model)
    total, done = sum(info.bytes for info in bundle.manifest.files.values()), 0

    def checked(_name: str, read: int) -> None:
        nonlocal done
        done += read
        if progress:
            progress("checksums", done, total)

    report.files_checked = bundle.check_sums(progress=checked)
    checkpoint = open_checkpoint(model, adapter=adapter)
    report.notes += checkpoint.notices
    identity = fingerprint(checkpoint)
    if identity != bundle.manifest.model.fingerprint:
        report.failures.append(
            f"the bundle was built from other weights ({bundle.manifest.model.fingerprint[:19]}) than {model} ({identity[:19]})"
        )
        return report
    weights = bundle.manifest.target_weights
    if weights is not None:
        round_weights(checkpoint, family_for(checkpoint), weights.choice, weights.block)
    drafts = _drafts(bundle, checkpoint, draft_folders, report)
    runnable = bundle.manifest.model.family in FAMILIES
    try:
        report.parity = check_parity(
            bundle,
            checkpoint,
            drafts=drafts,
            memory_limit=settings.parity_memory,
            generation=runnable,
            progress=(lambda _name, done, total: progress("parity", done, total)) if progress else None,
        )
    except ExportError as error:
        report.failures.append(str(error))
    if runnable:
        rows = check_losslessness(
            bundle, settings.prompts, settings.max_new_tokens, settings.images, progress, settings.device
        )
        report.lossless = rows
        if not rows:
            report.notes.append("the bundle has no draft: losslessness was not checked")
        report.failures += failures(rows)
        report.notes += [note for row in rows for note in row.notes()]
        if settings.certificate is not None:
            _certify(bundle, settings, report, progress)
    else:
        report.notes.append(
            f"the runtime has no family {bundle.manifest.model.family!r}: losslessness was not checked"
        )
    return report


def _certify(
    bundle: Bundle,
    settings: VerifySettings,
    report: VerifyReport,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Make a certificate, and write it into the bundle."""
    certificate = report.certificate = certify(
        bundle, settings.certificate or 1, settings.max_new_tokens, settings.images, progress, settings.device
    )
    if certificate is None:
        report.notes.append("no draft of the bundle runs here: there is nothing to certify")
        return
    store_certificate(bundle.path, certificate)
    report.failures += certificate_failures(certificate, bundle.manifest)


def _drafts(
    bundle: Bundle, checkpoint: Checkpoint, folders: Sequence[Path], report: VerifyReport
) -> list[Draft]:
    """The bundle's drafts with graphs whose PyTorch side is at hand: in a given folder, or shipped with the model."""
    known = [(path, open_draft(path)) for path in folders]
    known += [(None, draft) for draft in shipped_drafts(checkpoint.alias)]
    wanted = {d.name: d for d in bundle.manifest.drafts if d.graphs}
    drafts: dict[str, Draft] = {}
    for path, draft in known:
        entry = wanted.get(draft.name)
        if entry is not None and entry.fingerprint in (None, draft.fingerprint):
            drafts.setdefault(draft.name, draft)
        elif path is not None:
            report.failures.append(
                f"--draft {path}: the bundle holds no draft of these weights "
                f"({draft.name}, {str(draft.fingerprint)[:19]})"
            )
    for name, entry in wanted.items():
        if name not in drafts and left_out([entry]) is None:  # of which the manifest says all
            graphs = ", ".join(entry.graphs.values())
            report.notes.append(f"{graphs} was not compared: give its draft's folder with --draft")
    return list(drafts.values())
