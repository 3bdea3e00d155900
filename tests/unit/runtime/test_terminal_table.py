"""Tables for people: figures and names are whole at every width, and texts give way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from vlmexport.runtime.commands.table import Table

FIGURES = st.from_regex(r"[1-9][0-9,]{0,11}(\.[0-9]{1,4})?( MB| ×)?", fullmatch=True)
TEXTS = st.text("abc ", max_size=60).map(str.strip)


def rendered(table: Table, width: int) -> str:
    """On a terminal."""
    out = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    with out.capture() as captured:
        out.print(table)
    return captured.get()


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """A column of names, some of figures and some of texts, of which the later ones may be dropped."""
    kinds = draw(st.lists(st.sampled_from(["figure", "text", "wrapped"]), min_size=1, max_size=6))
    table = Table()
    table.add_column("name", whole=True)
    for number, kind in enumerate(kinds):
        name = draw(st.sampled_from(["", "tokens/s", "weights in it", "max – min"]))
        right = "right" if kind == "figure" else "left"
        table.add_column(name, justify=right, wrap=kind == "wrapped", drop=draw(st.integers(0, number)))
    for row in range(draw(st.integers(1, 4))):
        table.add_row(f"row-{row}", *(draw(FIGURES if kind == "figure" else TEXTS) for kind in kinds))
    return table


@given(tables(), st.integers(28, 120))
def test_figures_are_not_cut_at_any_width(table: Table, width: int) -> None:
    kept, _ = table.kept(width)
    shown = " ".join(rendered(table, width).split())
    for column in kept or table.columns:
        for cell in column.cells:
            assert not column.whole or " ".join(cell.split()) in shown, (cell, shown)
    assert all(len(line) <= width for line in rendered(table, width).splitlines())


@given(tables())
def test_redirected_tables_are_not_cut(table: Table) -> None:
    out = Console(width=40, force_terminal=False, color_system=None, soft_wrap=True)
    with out.capture() as captured:
        out.print(table)
    lines = captured.get().splitlines()
    assert "…" not in captured.get() and all(line == line.rstrip() for line in lines)
    for column in table.columns:
        assert all(cell in captured.get() for cell in column.cells)
    assert lines == [line for line, _ in table.lines(math.inf)]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (80, "graph|reference|values|limit\nsegment.0|transformers|110,616|1.0e-05"),
        (36, "graph|values|limit\nsegment.0|110,616|1.0e-05"),
        (26, "graph|limit\nsegment.0|1.0e-05"),
        (15, "segment.0\nreference:\ntransformers\nvalues:\n110,616\nlimit:\n1.0e-05"),
    ],
)
def test_columns_are_dropped_in_their_order(width: int, expected: str) -> None:
    table = Table()
    table.add_column("graph", whole=True)
    table.add_column("reference", whole=True, drop=2)
    table.add_column("values", justify="right", drop=1)
    table.add_column("limit", justify="right")
    table.add_row("segment.0", "transformers", "110,616", "1.0e-05")
    lines = ["|".join(line.split()) for line in rendered(table, width).splitlines()]
    assert "\n".join(lines) == expected


def test_long_text_is_cut_or_wrapped() -> None:
    table = Table("Drafts")
    table.add_column("draft", wrap=True)
    table.add_column("kind")
    table.add_column("alpha", justify="right")
    table.add_row("a folder with a name", "prompt-lookup", "0.8125")
    assert rendered(table, 28).splitlines() == [
        "Drafts",
        "draft     kind         alpha",
        "a         prompt-l…   0.8125",
        "folder",
        "with a",
        "name",
    ]
