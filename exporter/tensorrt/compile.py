"""Plans for a bundle that is there already, built here or elsewhere: a new folder takes its place when they are complete.

Nothing here needs PyTorch or transformers: a Jetson compiles what a workstation exported.
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.bundle.manifest_file import MANIFEST, read_manifest
from ...runtime.bundle.schema import ITEM_SIZES
from ...runtime.common.errors import ExportError, OptionError
from ..output import check_space, replaced_folder, write_manifest
from .options import PlanOptions, Resolved, check_attention, check_integers, resolve
from .plans import PlanReport, add_plans

Progress = Callable[[str, int, int, str], None]
"""`progress("plans", done, in all, graph whose plan is next)`; "" behind the last."""

SPARE_BYTES = 64 << 20
"""Disk space asked for beyond the weights: kernels of the plans."""


@dataclass(frozen=True)
class CompileReport:
    """What was built, and how many plans it took the place of; `bytes` is the whole bundle."""

    bundle: Path
    plans: PlanReport
    replaced: int
    bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As `runtime/schemas/compile-1.json` has it, but for its version."""
        plans = self.plans
        return {
            "status": "compiled", "bundle": str(self.bundle), "backend": plans.backend, "version": plans.version,
            "target": plans.target, "precision": plans.precision, "lowering": plans.lowering,
            "replaced": self.replaced, "plan_bytes": plans.bytes, "bytes": self.bytes, "seconds": round(self.seconds, 3),
            "plans": plans.entries,
        }  # fmt: skip


def compile_bundle(path: Path, options: PlanOptions, progress: Progress | None = None) -> CompileReport:
    """Builds the plans of every graph of the bundle at `path`, in place of those of the same backend and target.

    They are built in a folder beside it, which has the bundle's other files as further names (hard links) and takes its
    place when manifest and checksums are written: on any failure, Ctrl-C included, the bundle is as it was. Who has it
    open keeps what it has open. Others may change its manifest while plans are built; only the exchange is locked.

    Raises BundleError for what is no valid bundle, OptionError for options that do not fit it and for a place that cannot
    be written, ExportError where TensorRT is missing or refuses a graph, and for a full disk.
    """
    begin = time.monotonic()
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    wanted = resolve(options, manifest.model.decoder, manifest.weights_dtype)
    precisions = {draft.name: draft.weights_dtype for draft in manifest.drafts}
    check_attention(manifest.decoder)
    check_integers(wanted, precisions, manifest.target_weights)
    home = path.resolve()
    check_place(home)
    check_space(home.parent, estimated_bytes(manifest, wanted))
    before, written = copy.deepcopy(manifest), 0

    def finish(folder: Path) -> None:
        nonlocal written
        take_over(home, before, manifest)
        written = write_manifest(folder, manifest)

    with replaced_folder(home, True, finish) as folder:
        shutil.copymode(home, folder)
        link_files(home, folder, manifest)
        report = add_plans(
            Bundle(folder, manifest),
            options,
            (lambda name, done, total: progress("plans", done, total, name)) if progress else None,
        )
    replaced = len(before.plans) + len(report.entries) - len(manifest.plans)
    total = written + sum(file.bytes for file in manifest.files.values())
    return CompileReport(path, report, replaced, total, time.monotonic() - begin)


def check_place(home: Path) -> None:
    """OptionError unless another folder can take the place of the bundle's."""
    for place in (home.parent, home):
        if not os.access(place, os.W_OK | os.X_OK):
            raise OptionError(
                f"cannot write to {place}: plans are built beside the bundle; compile a copy of it that you may write to"
            )


def estimated_bytes(manifest: Manifest, wanted: Resolved) -> int:
    """What the plans take on the disk, about: every weight once more, in their precision."""
    integers = sum(map(manifest.integer_bytes, manifest.graphs))
    numbers = (manifest.weights.total - integers) // ITEM_SIZES[manifest.weights_dtype]
    return numbers * ITEM_SIZES[wanted.precision] + integers + SPARE_BYTES


def link_files(home: Path, folder: Path, manifest: Manifest) -> None:
    """Gives every listed file of the bundle a second name in `folder`; where the file system has none, a copy."""
    for name in manifest.files:
        source, target = (home / name).resolve(), folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


def take_over(home: Path, before: Manifest, manifest: Manifest) -> None:
    """Lets `manifest` have what was measured (`tune`, `bench --save`) while plans were built. Raises ExportError where
    the bundle at `home` became another one since it was `before`. Nobody may change it meanwhile (`locked`)."""
    now = Manifest.from_dict(read_manifest(home / MANIFEST))
    if (now.files, now.plans) != (before.files, before.plans):
        raise ExportError(f"{home} was changed while its plans were built; it stays so: compile it again")
    manifest.costs, manifest.acceptance = now.costs, now.acceptance
