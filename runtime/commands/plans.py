"""TensorRT plans as `compile`, `build` and `inspect` show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .output import size
from .table import Table


def plans_tables(plans: Sequence[dict[str, Any]]) -> list[Table]:
    """A table for those of each target, precision and version, as they stand in a manifest."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for plan in plans:
        about = [
            str(plan.get(name, "")) for name in ("target", "backend", "version", "precision", "lowering")
        ]
        groups.setdefault((*about, "" if plan.get("executed") else ", not run"), []).append(plan)
    return [_table(about, group) for about, group in groups.items()]


def _table(about: tuple[str, ...], plans: Sequence[dict[str, Any]]) -> Table:
    target, backend, version, precision, lowering, run = about
    kind = ", ".join(filter(None, (f"{backend} {version}".strip(), precision, lowering)))
    table = Table(f"TensorRT plans for {target} ({kind}){run}")
    table.add_column("graph", whole=True)
    for name in ("plan", "weights in it", "overhead"):
        table.add_column(name, justify="right")
    table.add_column("attention", drop=1)
    table.add_column("cache updates", justify="right")
    for plan in plans:
        updates = plan.get("layers", {}).get("KV_CACHE_UPDATE", 0)
        table.add_row(
            plan["graph"],
            size(plan["bytes"]),
            *(size(plan[name]) if name in plan else "" for name in ("weight_bytes", "overhead_bytes")),
            {True: "fused", False: "decomposed", None: ""}[plan.get("fused_attention")],
            str(updates or ""),
        )
    return table
