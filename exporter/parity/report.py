"""Parity for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def parity_table(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A rich table of parity entries as they stand in the manifest."""
    from rich.table import Table

    table = Table(title="Parity with PyTorch (float32)")
    for name in ("graph", "reference", "inputs"):
        table.add_column(name)
    for name in ("values", "largest difference", "relative", "limit"):
        table.add_column(name, justify="right")
    for row in rows:
        if row["graph"] == "generation":
            table.add_row("generation", row["reference"], row["inputs"], f"{row['values']} tokens", "equal", "", "")
            continue
        table.add_row(
            row["graph"], row["reference"], row["inputs"], f"{row['values']:,}", f"{row['max_abs_difference']:.2e}",
            f"{row['relative_difference']:.2e}", f"{row['limit']:.0e}" if row["limit"] else "0",
        )  # fmt: skip
    return table
