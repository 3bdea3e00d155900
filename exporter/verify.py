"""`vlmexport verify`: checksums, identity, parity with PyTorch, and losslessness of every draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.bundle import Bundle
from ..runtime.errors import ExportError
from ..runtime.families import FAMILIES
from ..runtime.proposers import always_wrong
from ..runtime.session import Session
from .checkpoint import Checkpoint, fingerprint, open_checkpoint
from .drafts.imitation import ImitationDraft
from .parity import check_parity
from .parity.capture import SENTENCE, sample_picture
from .parity.generation import first_difference

WRONG = "always-wrong"
QUESTIONS = (None, "what is on the table", "how many objects are there", "describe the scene")


@dataclass
class LosslessRow:
    """Plain against speculative decoding with one draft, over all requests."""

    draft: str
    requests: int
    tokens: int
    different: int
    first_difference: tuple[int, int] | None
    """(request, token) of the first divergence."""
    alpha: float | None
    tau: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        first = list(self.first_difference) if self.first_difference else None
        return {**self.__dict__, "first_difference": first}


@dataclass
class VerifyReport:
    """The outcome. `failures` are sentences; none means verified. `notes` say what could not be compared."""

    bundle: str
    model: str
    files_checked: int = 0
    parity: list[dict[str, Any]] = field(default_factory=list)
    lossless: list[LosslessRow] = field(default_factory=list)
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
            "failures": self.failures, "notes": self.notes,
        }  # fmt: skip


def verify_bundle(
    folder: Path,
    model: str,
    *,
    draft_folders: Sequence[Path] = (),
    prompts: int = 3,
    max_new_tokens: int = 24,
    images: Sequence[Path] = (),
    parity_memory: int = 4 << 30,
    progress: Callable[[str, int, int], None] | None = None,
) -> VerifyReport:
    """Checks a bundle against the model it was built from. Raises BundleError for a bundle that cannot be opened and
    OptionError for an unknown model; differences are reported, not raised."""
    bundle = Bundle.open(folder)
    report = VerifyReport(str(folder), model)
    total = len(bundle.manifest.files)

    def checked(_name: str, _bytes: int) -> None:
        report.files_checked += 1
        if progress:
            progress("checksums", report.files_checked, total)

    report.files_checked = 0
    count = bundle.check_sums(progress=checked)
    report.files_checked = count
    checkpoint = open_checkpoint(model)
    found = fingerprint(checkpoint)
    if found != bundle.manifest.model.fingerprint:
        report.failures.append(
            f"the bundle was built from other weights ({bundle.manifest.model.fingerprint[:19]}) than {model} ({found[:19]})"
        )
        return report
    networks = _networks(bundle, checkpoint, draft_folders, report)
    runnable = bundle.manifest.model.family in FAMILIES
    try:
        report.parity = check_parity(
            Path(folder),
            checkpoint,
            networks=networks,
            memory_limit=parity_memory,
            generation=runnable,
            progress=(lambda _name, done, total: progress("parity", done, total)) if progress else None,
        )
    except ExportError as error:
        report.failures.append(str(error))
    if runnable:
        _losslessness(bundle, report, prompts, max_new_tokens, images, progress)
    else:
        report.notes.append(
            f"the runtime has no family {bundle.manifest.model.family!r}: losslessness was not checked"
        )
    return report


def _networks(
    bundle: Bundle, checkpoint: Checkpoint, folders: Sequence[Path], report: VerifyReport
) -> dict[str, Any]:
    """The PyTorch network of every imitation graph for which a draft folder is known."""
    known = list(folders)
    if checkpoint.alias is not None:
        known += checkpoint.alias.drafts().values()
    networks = {}
    for path in known:
        draft = ImitationDraft.load(path)
        name = f"imitation.{draft.layer}"
        if name in bundle.manifest.graphs:
            networks.setdefault(name, draft.network)
    for name, graph in bundle.manifest.graphs.items():
        if graph.role == "imitation" and name not in networks:
            report.notes.append(f"{name} was not compared: give its draft's folder with --draft")
    return networks


def _losslessness(
    bundle: Bundle,
    report: VerifyReport,
    count: int,
    max_new_tokens: int,
    images: Sequence[Path],
    progress: Callable[[str, int, int], None] | None,
) -> None:
    manifest = bundle.manifest
    requests = list(_requests(manifest.to_dict(), count, images))
    drafts = [d.name for d in manifest.drafts]
    if not drafts:
        report.notes.append("the bundle has no draft: losslessness was not checked")
        return
    arms = [*drafts, *(f"{WRONG} ({d})" for d in drafts[:1])]
    done, total = 0, len(requests) * (1 + len(arms))

    with Session.load(bundle) as session:
        budget = min(max_new_tokens, manifest.limits.max_length // 2)

        def tokens(request: tuple[Any, Any], **options: Any) -> Any:
            nonlocal done
            image, prompt = request
            result = session.generate(image=image, prompt=prompt, max_new_tokens=budget, **options)
            done += 1
            if progress:
                progress("lossless", done, total)
            return result

        plain = [tokens(r, speculative=False).tokens for r in requests]
        for arm in arms:
            name = arm.partition("(")[2].rstrip(")") or arm
            with _arm(session, arm):
                results = [tokens(r, draft=name) for r in requests]
            row = _compare(arm, plain, results)
            report.lossless.append(row)
            if row.different:
                report.failures.append(
                    f"with draft {arm}, {row.different} of {row.requests} requests differ from plain decoding"
                )


@contextmanager
def _arm(session: Session, name: str) -> Iterator[None]:
    if name.startswith(WRONG):
        with always_wrong(session):
            yield
    else:
        yield


def _compare(arm: str, plain: list[list[int]], results: list[Any]) -> LosslessRow:
    differences = [
        (i, first_difference(p, r.tokens)) for i, (p, r) in enumerate(zip(plain, results, strict=True))
    ]
    different = [(i, d) for i, d in differences if d is not None]
    accepted = sum(r.stats.accepted for r in results)
    evaluated = sum(r.stats.evaluated for r in results)
    cycles = sum(r.stats.cycles for r in results)
    return LosslessRow(
        arm,
        len(plain),
        sum(len(p) for p in plain),
        len(different),
        different[0] if different else None,
        accepted / evaluated if evaluated else None,
        (accepted + cycles) / cycles if cycles else None,
    )


def _requests(manifest: dict[str, Any], count: int, images: Sequence[Path]) -> Iterator[tuple[Any, Any]]:
    """(image, prompt) pairs: given images, or drawn pictures; a text model gets parts of a sentence."""
    random = np.random.default_rng(17)
    words = SENTENCE.split()
    for index in range(count):
        if manifest["image"] is None:
            yield None, " ".join(words[index % len(words) :][: 6 + index % 5] or words)
            continue
        prompt = QUESTIONS[index % len(QUESTIONS)]
        if images:
            yield str(images[index % len(images)]), prompt
            continue
        picture = sample_picture(manifest["image"]["height"], manifest["image"]["width"])
        yield np.roll(picture, tuple(random.integers(0, picture.shape[0], 2)), (0, 1)), prompt


def verify_tables(report: VerifyReport) -> list[Any]:
    """The report as rich renderables."""
    from rich.table import Table

    from .parity import parity_table

    shown: list[Any] = [f"{report.bundle}: {report.files_checked} files match their checksums"]
    if report.parity:
        shown.append(parity_table(report.parity))
    if report.lossless:
        table = Table(title="Plain against speculative decoding")
        table.add_column("draft")
        for name in ("requests", "tokens", "different", "alpha", "tau"):
            table.add_column(name, justify="right")
        for row in report.lossless:
            table.add_row(
                row.draft, str(row.requests), str(row.tokens), str(row.different),
                "–" if row.alpha is None else f"{row.alpha:.2f}", "–" if row.tau is None else f"{row.tau:.2f}",
            )  # fmt: skip
        shown.append(table)
    return shown + report.notes + report.failures
