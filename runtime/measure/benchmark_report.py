"""The report of a benchmark: both arms side by side, what was predicted, and what the graphs alone allow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..bundle.stored_acceptance import stored_acceptance
from ..bundle.stored_costs import find_costs
from ..hardware import machine
from ..policy.base import FixedLength
from ..session.request import resolve
from ..session.request_options import request_options
from ..speedup.cost_model import FREE, CostTable, Curve
from ..speedup.predict import predictions
from ..speedup.stats import Stats
from .tree_search import observed_trees
from .virtual_clock import decoding

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo
    from ..engines.base import Engine
    from ..session.session import Result, Session


@dataclass
class Arm:
    """One way of decoding: per repeat, sums over the requests."""

    tokens: list[int] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)
    engine_seconds: list[float] = field(default_factory=list)

    def add(self, results: Sequence[Result], seconds: Sequence[float]) -> None:
        """Take one repeat. Decoding starts at the first token, which prefill gives."""
        first = sum(result.stats.time_to_first_token for result in results)
        self.tokens.append(sum(len(result.tokens) - 1 for result in results))
        self.first_seconds.append(first)
        self.decode_seconds.append(sum(seconds) - first)
        self.engine_seconds.append(sum(result.stats.engine_seconds or 0.0 for result in results))

    @property
    def rates(self) -> list[float]:
        """Decoded tokens per second of each repeat."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.decode_seconds, strict=True)]

    @property
    def totals(self) -> list[float]:
        """Seconds of each repeat, image and prompt included."""
        return [a + b for a, b in zip(self.first_seconds, self.decode_seconds, strict=True)]

    @property
    def host_share(self) -> float | None:
        """Median share of decoding that was not inside the engine; None on an engine that does not count it."""
        if not all(self.engine_seconds):
            return None
        return statistics.median(
            1 - inside / whole for inside, whole in zip(self.engine_seconds, self.decode_seconds, strict=True)
        )

    @property
    def engine_rates(self) -> list[float]:
        """Decoded tokens per second inside the engine, of each repeat. Raises `ZeroDivisionError` without such seconds."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.engine_seconds, strict=True)]

    def report(self) -> dict[str, Any]:
        """Medians, and the range of the rate."""
        rates = self.rates
        return {
            "tokens_per_second": statistics.median(rates),
            "tokens_per_second_min": min(rates),
            "tokens_per_second_max": max(rates),
            "seconds": statistics.median(self.totals),
            "seconds_to_first_token": statistics.median(self.first_seconds),
            "host_share": self.host_share,
        }


def report_of(
    session: Session,
    names: Sequence[str],
    results: Sequence[Result],
    table: CostTable,
    plain: Arm,
    speculative: Arm,
    draft: DraftInfo,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The report of a benchmark, without its costs. `names` are of the requests, `results` of the last repeat."""
    manifest = session.bundle.manifest
    total = Stats.total(result.stats for result in results)
    costs = table.drafts.get(draft.name, FREE)
    arms = side_by_side(plain, speculative)
    bound = _bound(table, draft.name, total)
    forced = session._forced_acceptance is not None
    unpredicted = "acceptance is forced" if forced else _unpredicted(options)
    predicted = predicted_speedup(session, draft, options) if unpredicted is None else None
    achieved = arms["speedup"]["decode"]
    inside = None
    if plain.host_share is not None and speculative.host_share is not None:
        inside = statistics.median(_ratios(speculative.engine_rates, plain.engine_rates))
    return {
        "schema_version": 1,
        "bundle": str(session.bundle.path),
        "model": manifest.model.source,
        "precision": manifest.weights_dtype,
        "note": session.note,
        "draft": {"name": draft.name, "kind": draft.kind, "layer": draft.layer, "trained": draft.trained},
        "draft_length": results[0].stats.draft_length or None,
        "lossy": total.lossy,
        "temperature": options.get("temperature", 0.0),
        "max_new_tokens": options["max_new_tokens"],
        "repeats": len(plain.tokens),
        "requests": [
            {"name": name, "tokens": len(result.tokens), "finish_reason": result.finish_reason}
            for name, result in zip(names, results, strict=True)
        ],
        **arms,
        "tau": total.tau if total.cycles else None,
        "alpha": total.alpha,
        "alpha_by_depth": [alpha for alpha in total.alpha_by_depth if alpha is not None],
        "cycles_by_drafted": _by_drafted(total),
        "width_cost": {str(width): value / table.plain(1) for width, value in table.plain.measured.items()},
        "passes": {
            "plain": _by_width(table.plain),
            "tail": {} if costs.tail is None else _by_width(costs.tail),
            "trunk": costs.trunk,
            "propose": costs.propose,
            "once": costs.once,
        },
        "bound": bound,
        "achieved": None if bound is None else achieved / bound["decode"],
        "inside_engine": inside,
        "predicted": predicted,
        "unpredicted": unpredicted,
        "machine": machine.describe(engine_of(session).machine),
    }


def side_by_side(plain: Arm, speculative: Arm) -> dict[str, Any]:
    """The report's figures of both arms, and its speed-ups: medians over the pairs of their quotients.

    Quotients of medians differ from the median of quotients. So that a report has one speed-up, whatever two figures of it
    a reader divides, the speculative arm is shown by what it was beside plain decoding: plain decoding's median, times the
    pairs' quotients. `pairs` has what was measured.
    """
    decode = _ratios(speculative.rates, plain.rates)
    speedup = {
        "decode": statistics.median(decode),
        "decode_min": min(decode),
        "decode_max": max(decode),
        "end_to_end": statistics.median(_ratios(plain.totals, speculative.totals)),
    }
    base = plain.report()
    beside = {
        "tokens_per_second" + end: base["tokens_per_second"] * speedup["decode" + end]
        for end in ("", "_min", "_max")
    }
    return {
        "plain": base,
        "speculative": {
            **speculative.report(),
            **beside,
            "seconds": base["seconds"] / speedup["end_to_end"],
        },
        "pairs": [
            {"plain": before, "speculative": after}
            for before, after in zip(plain.rates, speculative.rates, strict=True)
        ],
        "speedup": speedup,
    }


def predicted_speedup(session: Session, draft: DraftInfo, options: Mapping[str, Any]) -> float | None:
    """What `tune` predicts of a draft here, under the caller's budget or under its fastest; None where this device or
    what was asked was not measured."""
    manifest = session.bundle.manifest
    costs = find_costs(manifest, engine_of(session).machine, session.threads or 1)
    if costs is None or costs.choice is None:
        return None
    length_options = {name: options.get(name) for name in ("draft_length", "draft_nodes", "adaptive")}
    controller = FixedLength(0)
    policy = resolve(
        request_options({**length_options, "draft": draft.name}), manifest, lambda *_: controller
    ).policy
    budget = policy.budget if isinstance(policy, FixedLength) and policy is not controller else None
    choice = costs.choice
    if choice.draft == draft.name and budget in (None, choice.budget):
        return choice.speedup
    observed = [entry.observed for entry in stored_acceptance(manifest) if entry.draft == draft.name]
    for entry in predictions(costs.table, observed):
        if budget in (None, entry.budget):
            return entry.speedup
    trees = observed_trees([draft], observed).get(draft.name)
    if budget is None or budget.nodes == budget.depth or trees is None:
        return None
    told = trees.predict(costs.table, budget)
    return None if told is None else told.speedup


def _unpredicted(options: Mapping[str, Any]) -> str | None:
    """Why there is no prediction of what was asked, whatever was calibrated; None where there may be one."""
    if options.get("temperature") or options.get("lossy") is not None:
        return "tune decodes greedily"
    if options.get("confidence_threshold") is not None or options.get("adaptive") == "confidence":
        return "tune knows fixed lengths and its own controller's"
    return None


def _by_drafted(total: Stats) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (nodes, _), count in sorted(total.shapes.items()):
        counts[str(nodes)] = counts.get(str(nodes), 0) + count
    return counts


def _by_width(curve: Curve) -> dict[str, float]:
    return {str(width): seconds for width, seconds in curve.measured.items()}


def _bound(table: CostTable, draft: str, total: Stats) -> dict[str, Any] | None:
    """What the graphs alone allow: the cycles that were decoded, by the table, without the tokens that were cut."""
    if not total.cycles:
        return None
    reading = decoding(table, draft, total)
    return {
        "decode": reading.speedup,
        "tokens_per_cycle": (total.tokens - total.requests) / total.cycles,
        "cycle_seconds": reading.seconds / total.cycles,
        "token_seconds": table.token_seconds(),
    }


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def engine_of(session: Session) -> Engine:
    """The engine of a session that is open."""
    return session.decoder.engine  # pyright: ignore[reportOptionalMemberAccess]
