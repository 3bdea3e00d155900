"""TensorRT plans of a bundle: their entries in the manifest, and which of them fit a GPU."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import BundleError, OptionError
from ..graphs.registry import graph_role
from ..hardware.devices import RTX_TARGETS
from .manifest import LOWERINGS, ValueInfo
from .schema import (
    GIB,
    ITEM_SIZES,
    Part,
    boolean,
    bundle_path,
    checked,
    dimension,
    integer,
    list_of,
    optional,
    string,
)

if TYPE_CHECKING:
    from .manifest import GraphInfo, Manifest

BACKENDS = ("tensorrt", "tensorrt-rtx")
"""The full library, and the one that compiles for other GPUs than that of the machine."""


def planned(manifest: Manifest) -> dict[str, GraphInfo]:
    """The graphs of a bundle that have plans where it has any: drafts that need others do not run on plans."""
    return {name: graph for name, graph in manifest.graphs.items() if graph_role(graph.role).has_plan}


@dataclass(kw_only=True)
class Binding(Part):
    """An input or output of a plan; `alias_of` names the input whose memory an output shares."""

    name: str = checked(string(200))
    mode: str = checked(string(10, ("input", "output")))
    dtype: str = checked(string(20, tuple(ITEM_SIZES)))
    shape: list[int | str] = checked(list_of(dimension, 8))
    alias_of: str | None = checked(optional(string(200)), default=None)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> ValueInfo:
        """As an input or output of a graph."""
        return ValueInfo(name=self.name, dtype=self.dtype, shape=self.shape)


@dataclass(kw_only=True)
class Plan(Part):
    """What an engine has to know of a plan; `version` is that of the TensorRT that built it."""

    graph: str = checked(string(200))
    file: str = checked(bundle_path)
    target: str = checked(string(40))
    backend: str = checked(string(40, BACKENDS))
    version: str = checked(string(40))
    precision: str = checked(string(20, ("float32", "float16", "bfloat16")))
    bindings: list[Binding] = checked(list_of(Binding.parse, 10_000))
    bytes: int | None = checked(optional(integer(0, 4096 * GIB)), default=None)
    lowering: str = checked(string(20, LOWERINGS), default="native")
    lean: bool = checked(boolean, default=False)
    """For the lean runtime alone."""
    driver: str | None = checked(optional(string(20)), default=None)
    """Of a plan that was built on a GPU: the newest CUDA that the driver there knew."""
    cuda: str | None = checked(optional(string(20)), default=None)
    """The version of the CUDA runtime there."""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Binding]:
        """By name."""
        return {each.name: each for each in self.bindings if each.mode == "input"}

    @property
    def outputs(self) -> dict[str, Binding]:
        """By name."""
        return {each.name: each for each in self.bindings if each.mode == "output"}


def compile_command(bundle: Path | str, backend: str | None, target: str, lean: bool = False) -> str:
    """What builds the plans of a bundle for a GPU, with `lean` for the lean runtime; without a `backend`, with the TensorRT
    that can."""
    if backend is None:
        backend = "tensorrt-rtx" if target in RTX_TARGETS else "tensorrt"
    there = f" --target {target}" if backend == "tensorrt-rtx" else " on the device"
    how = " --lean" if lean else ""
    return f"`vlmexport compile {shlex.quote(str(bundle))} --backend {backend}{how}{there}`"


def choose_plans(
    manifest: Manifest, bundle: Path | str, target: str, installed: Callable[[str], bool]
) -> dict[str, Plan]:
    """The plan of every graph that has one for the GPU `target`, of one TensorRT: an `installed` one where there are several.

    Raises `BundleError` for graphs without a plan, `OptionError` where there is no plan for
    that GPU; both name the command that builds them.
    """
    here = [(number, plan) for number, plan in enumerate(manifest.plans) if plan.get("target") == target]
    if not here:
        known = sorted({f"{plan.get('backend')} for {plan.get('target')}" for plan in manifest.plans})
        raise OptionError(
            f"{bundle}: no TensorRT plans for this GPU ({target}); the bundle has {', '.join(known)[:200] or 'none'}; build "
            f"them with {compile_command(bundle, None, target)}"
        )
    plans = [Plan.parse(plan, f"plans[{number}]") for number, plan in here]
    backends = sorted({plan.backend for plan in plans}, key=lambda name: (not installed(name), name))
    by_graph = {plan.graph: plan for plan in plans if plan.backend == backends[0]}
    command = compile_command(bundle, backends[0], target)
    missing = sorted(planned(manifest).keys() - by_graph.keys())
    if missing:
        raise BundleError(
            f"{bundle}: no {backends[0]} plan for {target} of {', '.join(missing)[:200]}; build them again with {command}"
        )
    if len({plan.lean for plan in by_graph.values()}) > 1:
        raise BundleError(
            f"{bundle}: some plans for {target} are for the lean runtime, others are not; build them again with {command}"
        )
    lowerings = {plan.lowering for plan in by_graph.values()}
    if len(lowerings) > 1:
        raise BundleError(
            f"{bundle}: plans for {target} are {' and '.join(sorted(lowerings))} ones; build them again with {command}"
        )
    return by_graph
