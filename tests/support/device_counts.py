"""The table that ends a run of the contract suite: what a cycle asked of the device, by family and draft."""

from __future__ import annotations

from collections.abc import Iterable

PROPERTY = "device.counts"
"""Under this name a test reports (family, draft, engine, cycles, {count: sum over the cycles})."""

Report = tuple[str, str, str, int, dict[str, int]]


def table(reports: Iterable[Report]) -> list[str]:
    """Lines with the mean of every count per cycle, one line per family, draft and engine."""
    sums: dict[tuple[str, str, str], tuple[int, dict[str, int]]] = {}
    for family, draft, engine, cycles, counts in reports:
        before, total = sums.get((family, draft, engine), (0, {}))
        total = {name: total.get(name, 0) + count for name, count in counts.items()}
        sums[family, draft, engine] = (before + cycles, total)
    names = list(next(iter(sums.values()))[1])
    rows = [("family", "draft", "engine", "cycles", *(name.replace("_", " ") for name in names))]
    for key, (cycles, total) in sorted(sums.items()):
        rows.append((*key, str(cycles), *(f"{total[name] / cycles:,.1f}" for name in names)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
