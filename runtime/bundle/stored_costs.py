"""Cost tables in a manifest: reading and writing an entry, picking this machine's, and the default without one."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..speedup.budget import Budget
from ..speedup.cost_model import FREE, CostTable, Curve, DraftCosts
from .combined_drafts import behind_requests, combinations
from .schema import Part, checked, failure, integer, list_of, mapping_of, number, optional, string

if TYPE_CHECKING:
    from ..speedup.predict import Prediction
    from .folder import Bundle
    from .manifest import DraftInfo, Manifest, PolicyInfo

FROM_MEMORY = {
    1: 1.0,
    2: 1.01,
    3: 1.03,
    4: 1.05,
    5: 1.06,
    6: 1.09,
    8: 1.23,
    10: 1.33,
    16: 1.59,
    24: 1.95,
    31: 2.3,
}
"""T(q)/T(1) where weights are read from memory at every pass: SmolLM2-135M in float32, two cores, quiet machine."""

FROM_CACHE = {1: 1.0, 2: 1.20, 3: 1.28, 4: 1.39, 5: 1.54, 6: 1.67, 8: 2.0, 10: 2.36, 12: 2.58, 16: 3.2}
"""T(q)/T(1) where weights stay in the processor's cache: the bundled 4 M model, one thread."""

FROM_INTEGERS = {
    1: 1.0, 2: 1.21, 3: 1.42, 4: 1.51, 5: 1.76, 6: 1.89, 8: 2.26, 10: 2.58, 12: 2.87, 16: 3.48,
}  # fmt: skip
"""T(q)/T(1) where the target's weights are integers: few bytes are read and as much is computed. SmolLM2-135M in int4, two
cores, quiet machine; int8 is flatter."""

CACHED_BYTES = 32 << 20
"""Weights up to this size count as cached."""

OWN_GRAPH = 0.1
"""Share of T(1) that a step of a draft with graphs of its own takes where nothing was measured: one layer and a head."""


def _seconds(value: Any, path: str) -> dict[int, float]:
    by_width = mapping_of(number(1e-9, 1e4), string(6), 64)(value, path)
    if not by_width or not all(width.isdigit() and 0 < int(width) <= 1 << 16 for width in by_width):
        raise failure(path, value, "an object of seconds by pass width")
    return {int(width): float(seconds) for width, seconds in by_width.items()}


@dataclass(kw_only=True)
class _StoredDraft(Part):
    tail: dict[int, float] | None = checked(optional(_seconds), default=None)
    trunk: float = checked(number(0, 1e4), default=0.0)
    propose: float = checked(number(0, 1e4), default=0.0)
    once: float = checked(number(0, 1e4), default=0.0)
    host: float = checked(number(0, 1e4), default=0.0)
    tree_host: dict[int, float] | None = checked(optional(_seconds), default=None)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: DraftCosts) -> _StoredDraft:
        """An entry from what was measured."""
        return cls(
            tail=None if costs.tail is None else costs.tail.measured,
            trunk=costs.trunk,
            propose=costs.propose,
            once=costs.once,
            host=costs.host,
            tree_host=dict(costs.tree_host) or None,
        )

    @property
    def costs(self) -> DraftCosts:
        """The entry as the speed model takes it."""
        tail = None if self.tail is None else Curve(self.tail)
        return DraftCosts(tail, self.trunk, self.propose, self.once, self.host, self.tree_host or {})


@dataclass(kw_only=True)
class StoredChoice(Part):
    """What pays on a device, by `tune`: a draft with its longest chain or its tree, null where none does; what was
    predicted of it, and of the tokens that a cycle must keep for it to pay."""

    draft: str | None = checked(optional(string(100)))
    draft_length: int = checked(integer(0, 4096), default=0)
    draft_nodes: int | None = checked(optional(integer(1, 4096)), default=None)
    speedup: float | None = checked(optional(number(0, 1e4)), default=None)
    tokens_per_cycle: float | None = checked(optional(number(0, 1e4)), default=None)
    break_even: float | None = checked(optional(number(0, 1e4)), default=None)
    interval: list[float] | None = checked(optional(list_of(number(0, 1e4), 2, 2)), default=None)
    """Of the speed-up, 95 %; None where it was told by the table, or measured on few requests."""
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prediction: Prediction | None) -> StoredChoice:
        """An entry from what was chosen."""
        if prediction is None:
            return cls(draft=None)
        budget = prediction.budget
        return cls(
            draft=prediction.draft, draft_length=budget.depth,
            draft_nodes=budget.nodes if budget.nodes > budget.depth else None, speedup=prediction.speedup,
            tokens_per_cycle=prediction.tokens_per_cycle, break_even=prediction.break_even,
            interval=None if prediction.interval is None else list(prediction.interval),
        )  # fmt: skip

    @property
    def budget(self) -> Budget | None:
        """Of its cycles; None where nothing is drafted."""
        if self.draft is None or not self.draft_length:
            return None
        return Budget(self.draft_nodes or self.draft_length, self.draft_length)

    def policy(self, before: PolicyInfo) -> PolicyInfo:
        """`before` with this choice."""
        if self.draft is None:
            return replace(before, speculative=False)
        return replace(
            before, draft=self.draft, speculative=True, draft_length=self.draft_length, draft_nodes=self.draft_nodes
        )  # fmt: skip


@dataclass(kw_only=True)
class StoredCosts(Part):
    """One entry of `costs`: pass times in seconds, what they were measured on, and what was chosen by them. One without
    pass times (`plain`) says nothing, and is passed over."""

    machine: str = checked(string(200))
    threads: int = checked(integer(1, 4096))
    date: str = checked(string(40), default="")
    cache: int | None = checked(optional(integer(0, 1 << 21)), default=None)
    """Cache length: key/value entries that were visible."""
    plain: dict[int, float] = checked(_seconds, default_factory=dict)
    host: float = checked(number(0, 1e4), default=0.0)
    drafts: dict[str, _StoredDraft] = checked(
        mapping_of(_StoredDraft.parse, string(100), 100), default_factory=dict
    )
    choice: StoredChoice | None = checked(optional(StoredChoice.parse), default=None)
    least_width: int | None = checked(optional(integer(1, 4096)), default=None)
    """From which width on `kernels` give a row of one sequence the same bits; None: nobody looked, or no such width."""
    kernels: str | None = checked(optional(string(200)), default=None)
    """Engine and version that `least_width` was found of."""
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, table: CostTable, machine: str, threads: int, date: str, cache: int) -> StoredCosts:
        """An entry from a measured table."""
        drafts = {name: _StoredDraft.of(costs) for name, costs in table.drafts.items()}
        return cls(
            machine=machine,
            threads=threads,
            date=date,
            cache=cache,
            plain=table.plain.measured,
            host=table.host,
            drafts=drafts,
        )

    @property
    def table(self) -> CostTable:
        """The table without its provenance."""
        drafts = {name: entry.costs for name, entry in self.drafts.items()}
        return CostTable(Curve(self.plain), drafts, self.host)

    def to_json(self) -> dict[str, Any]:
        """A JSON object: widths become strings."""
        return _strings(self.to_dict())


def _strings(value: Any) -> Any:
    return {str(k): _strings(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def pick_costs(manifest: Manifest, machine: str, threads: int) -> CostTable:
    """The latest table that was stored on `machine` with `threads`, else the default in units of T(1).

    A draft that the stored table does not know gets its default share of the measured T(1).
    Raises `BundleError` for an entry that is not one.
    """
    entry = find_costs(manifest, machine, threads)
    if entry is None:
        return default_costs(manifest)
    table = entry.table
    missing = [draft for draft in manifest.drafts if draft.name not in table.drafts]
    shares = {draft.name: default_draft(manifest, draft, table.plain) for draft in missing}
    return replace(table, drafts={**table.drafts, **shares})


def with_combinations(table: CostTable, drafts: Sequence[DraftInfo]) -> CostTable:
    """The table with an entry for every combination of these drafts: that of its second one, which runs in some of its
    cycles."""
    behind = combinations(drafts)
    own = {name: table.drafts[last] for name, last in behind.items() if last in table.drafts}
    return replace(table, drafts={**table.drafts, **own})


def with_drafts_of_requests(table: CostTable, drafts: Sequence[DraftInfo]) -> CostTable:
    """`with_combinations`, and those with a draft of requests before them, which nobody measured: around their passes the
    host does as much as around those of whichever listed draft has most."""
    table = with_combinations(table, drafts)
    measured = [draft.name for draft in drafts if draft.layer is None and draft.name in table.drafts]
    host = max((table.drafts[name].host for name in measured), default=0.0)
    entries = {
        name: replace(table.drafts.get(last or "", FREE), host=host)
        for name, last in behind_requests(drafts).items()
    }
    return replace(table, drafts={**table.drafts, **entries})


def find_costs(manifest: Manifest, machine: str, threads: int) -> StoredCosts | None:
    """The latest entry that was stored on `machine` with `threads`. Raises `BundleError` for an entry that is not one."""
    here = [entry for entry in every_costs(manifest) if (entry.machine, entry.threads) == (machine, threads)]
    return here[-1] if here else None


def stored_least_width(manifest: Manifest, machine: str, threads: int, kernels: str) -> int | None:
    """The least width that was found on `machine` with `threads` of these `kernels`, or None. Raises `BundleError` for an
    entry that is not one."""
    entry = find_costs(manifest, machine, threads)
    return None if entry is None or entry.kernels != kernels else entry.least_width


def every_costs(manifest: Manifest) -> list[StoredCosts]:
    """All entries with pass times, oldest first. Raises `BundleError` for an entry that is not one."""
    entries = [StoredCosts.parse(entry, f"costs[{at}]") for at, entry in enumerate(manifest.costs)]
    return [entry for entry in entries if entry.plain]


def bundle_here(bundle: Bundle, machine: str, threads: int) -> Bundle:
    """The bundle with the policy that was chosen for `machine` with `threads`, where `tune` chose one.

    Raises `BundleError` for an entry that is not one.
    """
    manifest = bundle.manifest
    entry = find_costs(manifest, machine, threads)
    choice = None if entry is None else entry.choice
    if choice is None or (choice.draft is not None and manifest.draft(choice.draft) is None):
        return bundle
    here = copy(bundle)
    here.manifest = replace(manifest, policy=choice.policy(manifest.policy))
    return here


def default_costs(manifest: Manifest) -> CostTable:
    """Costs in units of T(1) where nothing was measured: by the size and the kind of the weights, and the shares of
    the layers."""
    plain = Curve(FROM_CACHE if manifest.weights.total <= CACHED_BYTES else FROM_MEMORY)
    if manifest.target_weights is not None:
        plain = Curve(FROM_INTEGERS)
    return CostTable(plain, {draft.name: default_draft(manifest, draft, plain) for draft in manifest.drafts})


def default_draft(manifest: Manifest, draft: DraftInfo, plain: Curve) -> DraftCosts:
    """A draft's part of such a table, where passes of the target take `plain`."""
    one = plain(1)
    decoder, words = manifest.decoder, manifest.text.vocab_size
    layer = 12 * decoder.hidden_size  # parameters of a layer per hidden unit: attention 4, feed-forward 8
    all_layers = layer * decoder.num_layers
    head = words / (words + all_layers)
    shares = draft.options.usual_shares(manifest, head)
    if shares is not None:
        return DraftCosts(once=shares.once * one, propose=shares.propose * one)
    if draft.layer is None:
        return DraftCosts(propose=OWN_GRAPH * one) if draft.graphs else FREE
    trunk = (1 - head) * draft.layer / decoder.num_layers
    network = (
        (1 - head) * layer / (6 * all_layers) * len(draft.graphs)
    )  # imitation: two matrices of the width
    tail = Curve({width: (1 - trunk) * seconds for width, seconds in plain.measured.items()})
    return DraftCosts(tail, trunk * one, (head + network) * one)
