"""`vlmexport compile`: TensorRT plans for a bundle that is there already."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ...runtime.commands.option_flags import with_flags
from ...runtime.commands.options import AsJson, Bundle
from ...runtime.common.optional_deps import need_extra
from ...runtime.common.options import Switch, Text
from ..pipeline.request import BACKENDS, LOWERING, PLAN_PRECISION, PLAN_TARGET, default_target
from .progress import shown

if TYPE_CHECKING:
    from ..tensorrt.compile import CompileReport


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Which plans are built."""

    backend: Annotated[
        str,
        Text(
            group="Engine",
            metavar=BACKENDS,
            help="TensorRT-RTX compiles on any x86 CPU, TensorRT on the GPU.",
        ),
    ]
    target: Annotated[str | None, PLAN_TARGET] = None
    plan_precision: Annotated[str, PLAN_PRECISION] = "auto"
    lowering: Annotated[str, LOWERING] = "auto"
    lean: Annotated[
        bool,
        Switch(
            group="Engine",
            help="For TensorRT's lean runtime (tensorrt_lean), of this version or a newer one.",
        ),
    ] = False


@with_flags
def compile_plans(bundle: Bundle, asked: CompileOptions, as_json: AsJson = False) -> None:
    """Build TensorRT plans into a bundle, in place of those for the same backend and target."""
    need_extra("compile", "`vlmexport compile`")
    from ...runtime.commands.output import print_json
    from ..tensorrt.compile import compile_bundle
    from ..tensorrt.options import PlanOptions

    target = asked.target or default_target(asked.backend)
    options = PlanOptions(asked.backend, target, asked.plan_precision, asked.lowering, asked.lean)
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
