"""`vlmexport compile`: TensorRT plans for a bundle that is there already."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from ...runtime.commands.options import AsJson, Bundle
from ...runtime.common.optional_deps import need_extra
from .progress import shown

if TYPE_CHECKING:
    from ..tensorrt.compile import CompileReport

BACKENDS = "tensorrt-rtx|tensorrt"

LOWERING = "Of the plans: portable where TensorRT has no cache update (before 10.15)."


def default_target(backend: str | None) -> str:
    """What plans are built for where no target is named."""
    return "native" if backend == "tensorrt" else "sm86"


def compile_plans(
    bundle: Bundle,
    backend: str = typer.Option(
        ..., "--backend", metavar=BACKENDS, help="TensorRT-RTX compiles on any x86 CPU, TensorRT on the GPU."
    ),
    target: str = typer.Option(
        None, "--target", metavar="SM", help="GPU of the plans: sm75 sm80 sm86 sm89 sm120 sm121; native."
    ),
    plan_precision: str = typer.Option(
        "auto", "--plan-precision", metavar="auto|fp16|bf16|fp32", help="Of the plans."
    ),
    lowering: str = typer.Option("auto", "--lowering", metavar="auto|native|portable", help=LOWERING),
    lean: bool = typer.Option(
        False, "--lean", help="For TensorRT's lean runtime (tensorrt_lean), of this version or a newer one."
    ),
    as_json: AsJson = False,
) -> None:
    """Build TensorRT plans into a bundle, in place of those for the same backend and target."""
    need_extra("compile", "`vlmexport compile`")
    from ...runtime.commands.output import print_json
    from ..tensorrt.compile import compile_bundle
    from ..tensorrt.options import PlanOptions

    options = PlanOptions(backend, target or default_target(backend), plan_precision, lowering, lean)
    with shown(as_json) as progress:
        report = compile_bundle(bundle, options, progress)
    if as_json:
        print_json({"schema_version": 1, **report.to_dict()})
    else:
        show(report)


def show(report: CompileReport) -> None:
    """Print what was built for people."""
    from ...runtime.commands.output import console, size
    from ...runtime.commands.plans import plans_tables

    for table in plans_tables(report.plans.entries):
        console().print(table)
    replaced = f", {report.replaced} replaced" if report.replaced else ""
    sys.stdout.write(
        f"{report.bundle}: {len(report.plans.entries)} plans{replaced}, {size(report.plans.bytes)} of "
        f"{size(report.bytes)}, {report.seconds:.0f} s\n"
    )
