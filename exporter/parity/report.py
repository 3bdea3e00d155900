"""Parity for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def parity_table(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A rich table of parity entries as they stand in the manifest."""
    from rich.table import Table

    table = Table(title="Parity on random and realistic inputs (float32)")
    for name in ("graph", "reference"):
        table.add_column(name, no_wrap=True)
    for name in ("values", "difference", "relative", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row["graph"] == "generation":
            table.add_row("generation", row["reference"], f"{row['values']} tokens", "equal", "", "")
            continue
        table.add_row(
            row["graph"], row["reference"], f"{row['values']:,}", f"{row['max_abs_difference']:.2e}",
            f"{row['relative_difference']:.2e}", f"{row['limit']:.0e}" if row["limit"] else "0",
        )  # fmt: skip
    return table
