"""Entries that are stored beside the description of a model: pass times, acceptance, plans. All of them are checked when a
manifest is read, so that nobody meets a bad one in the middle of his work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..common.errors import BundleError
from .certificate import Certificate
from .plans import Plan
from .schema import failure
from .stored_acceptance import StoredAcceptance
from .stored_costs import StoredCosts

if TYPE_CHECKING:
    from .manifest import Manifest


def check_entries(manifest: Manifest) -> None:
    """Raise `BundleError` that names the first bad field of an entry and its value."""
    check_measured(manifest.costs, manifest.acceptance)
    for at, entry in enumerate(manifest.certificates):
        Certificate.parse(entry, f"certificates[{at}]")
    taken: dict[Any, int] = {}
    for at, entry in enumerate(manifest.plans):
        plan = Plan.parse(entry, f"plans[{at}]")
        _check_plan(manifest, plan, f"plans[{at}]")
        for what in (plan.file, (plan.backend, plan.target, plan.graph)):
            if what in taken:
                raise failure(f"plans[{at}]", what, f"unique: plans[{taken[what]}] has it, too")
            taken[what] = at


def check_measured(costs: Sequence[Any], acceptance: Sequence[Any]) -> None:
    """Raise `BundleError` that names the first bad field of an entry of `costs` or `acceptance`, and its value."""
    for at, entry in enumerate(costs):
        StoredCosts.parse(entry, f"costs[{at}]")
    for at, entry in enumerate(acceptance):
        _check_counts(StoredAcceptance.parse(entry, f"acceptance[{at}]"), f"acceptance[{at}]")


def _check_counts(entry: StoredAcceptance, where: str) -> None:
    """A draft accepts no more tokens of a depth than were judged there, and no more are cut off than it accepted."""
    judged = entry.observed.evaluated
    for depth, (right, most) in enumerate(zip(entry.accepted, judged, strict=True)):
        if right > most:
            raise failure(f"{where}.accepted[{depth}]", right, f"at most the {most} that were judged")
    if entry.discarded > (most := sum(entry.accepted)):
        raise failure(f"{where}.discarded", entry.discarded, f"at most the {most} that were accepted")


def check_report(document: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """(costs, acceptance) of a report of `tune`, or of a manifest, as entries of a manifest. Raises `BundleError` that
    names the first bad field and its value."""
    costs, acceptance = document.get("costs"), document.get("acceptance", [])
    if isinstance(costs, Mapping):
        if not StoredCosts.parse(costs, "costs").plain:
            raise BundleError("manifest field 'costs.plain' is missing")
        costs = [costs]
    if not isinstance(costs, list):
        raise failure("costs", costs, "an object, or a list of them")
    if not isinstance(acceptance, list):
        raise failure("acceptance", acceptance, "a list")
    check_measured(costs, acceptance)
    return costs, acceptance


def _check_plan(manifest: Manifest, plan: Plan, where: str) -> None:
    if not plan.file.startswith("plans/"):
        raise failure(f"{where}.file", plan.file, "a file below plans/")
    if plan.file not in manifest.files:
        raise failure(f"{where}.file", plan.file, "a file listed under 'files'")
    if plan.graph not in manifest.graphs:
        raise failure(f"{where}.graph", plan.graph, "a graph of this bundle")
    size = manifest.files[plan.file].bytes
    if plan.bytes not in (None, size):
        raise failure(f"{where}.bytes", plan.bytes, f"the size under 'files' ({size})")
    if not plan.outputs:
        raise failure(
            f"{where}.bindings", [binding.name for binding in plan.bindings], "a list with an output"
        )
    seen: set[str] = set()
    for at, binding in enumerate(plan.bindings):
        if binding.name in seen:
            raise failure(f"{where}.bindings[{at}].name", binding.name, "unique among the bindings")
        seen.add(binding.name)
        if binding.alias_of is not None and not (
            binding.mode == "output" and binding.alias_of in plan.inputs
        ):
            expected = "an input of this plan whose memory an output shares"
            raise failure(f"{where}.bindings[{at}].alias_of", binding.alias_of, expected)
