"""Tables for people whose figures are whole, however narrow the terminal is."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

GAPS = (3, 2)
"""Blanks between columns where there is room, and where there is not."""

SHORTEST = 8
"""Characters that are left of a text at least."""


@dataclass
class Column:
    """One column. Figures are on the right. `drop`: columns with a higher number go first where all do not fit, those with 0
    never; `wrap`: a long text goes on in the next line, at a blank."""

    name: str
    right: bool
    whole: bool
    wrap: bool
    drop: int
    cells: list[str]

    @property
    def natural(self) -> int:
        """Width of everything in one line."""
        return max(
            map(
                _length, (*self.name.split("\n"), *(line for cell in self.cells for line in cell.split("\n")))
            )
        )

    @property
    def least(self) -> int:
        """Width below which a figure, or a word of the header, would be cut."""
        header = max(map(_length, self.name.split()), default=0)
        if self.whole:
            return max([header, *map(_length, self.cells)])
        words = max((_length(word) for cell in self.cells for word in cell.split()), default=0)
        return max(header, words if self.wrap else min(self.natural, SHORTEST))

    def lines(self, text: str, width: int) -> list[str]:
        """A cell in lines of at most `width`."""
        if self.whole:
            return [text]
        if self.wrap:
            return _wrapped(text, width)
        return [_cut(text, width)]


class Table:
    """Columns of figures (`justify="right"`) and of names (`whole`) are never cut; texts are, or go on in the next line
    (`wrap`). Where that does not fit, columns with a `drop` are left out, the highest first; where nothing more can be, each
    row becomes lines of `column: value`. Off a terminal lines are as long as they are.

    A renderable of rich; cells are plain text.
    """

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.columns: list[Column] = []
        self.rows = 0

    def add_column(
        self, name: str = "", *, justify: str = "left", whole: bool = False, wrap: bool = False, drop: int = 0
    ) -> None:
        """One more column, before the rows are added."""
        right = justify == "right"
        self.columns.append(Column(name, right, whole or right, wrap, drop, []))

    def add_row(self, *cells: str) -> None:
        """A cell for every column."""
        for column, cell in zip(self.columns, cells, strict=True):
            column.cells.append(cell)
        self.rows += 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        room = options.max_width if console.is_terminal else math.inf
        if self.title:
            yield Text(self.title, style="bold")
        for line, bold in self.lines(room):
            text = Text(line, style="bold" if bold else "")
            # On a terminal a word that no line holds goes on in the next.
            text.no_wrap, text.overflow = not console.is_terminal, "fold" if console.is_terminal else "ignore"
            yield text

    def lines(self, room: float) -> Iterator[tuple[str, bool]]:
        """Every line, and whether it belongs to the header."""
        kept, gap = self.kept(room)
        if not kept:
            yield from ((line, False) for line in self._records(room))
            return
        widths = _widths(kept, room - gap * (len(kept) - 1))
        header = [_wrapped(column.name, width) for column, width in zip(kept, widths, strict=True)]
        if any(column.name for column in kept):
            high = max(map(len, header))
            header = [[""] * (high - len(lines)) + lines for lines in header]
            yield from ((line, True) for line in _joined(kept, header, widths, gap))
        for row in range(self.rows):
            cells = [
                column.lines(column.cells[row], width) for column, width in zip(kept, widths, strict=True)
            ]
            yield from ((line, False) for line in _joined(kept, cells, widths, gap))

    def printed(self) -> Iterator[str]:
        """The lines for stdout, as wide as its terminal."""
        import shutil
        import sys

        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
        yield from ([self.title] if self.title else [])
        yield from (line for line, _ in self.lines(room))

    def kept(self, room: float) -> tuple[list[Column], int]:
        """The columns that fit, and the blanks between them; no column where figures would be cut all the same."""
        left = list(self.columns)
        while True:
            for gap in GAPS:
                if sum(column.least for column in left) + gap * (len(left) - 1) <= room:
                    return left, gap
            last = max(left, key=lambda column: column.drop)
            if not last.drop:
                return [], 0
            left.remove(last)

    def _records(self, room: float) -> Iterator[str]:
        first, *others = self.columns
        for row in range(self.rows):
            yield f"{first.name} {first.cells[row]}" if first.right else first.cells[row]
            for column in others:
                named = f"{column.name}: {column.cells[row]}" if column.name else column.cells[row]
                for line in _wrapped(named, int(room) - 2) if column.cells[row] else []:
                    yield f"  {line}"


def _widths(columns: Sequence[Column], room: float) -> list[int]:
    """At least what each needs; the room that is left goes to texts first, then to headers, evenly."""
    widths = [column.least for column in columns]
    for figures in (False, True):
        short = [i for i, column in enumerate(columns) if column.right == figures]
        while (short := [i for i in short if widths[i] < columns[i].natural]) and sum(widths) < room:
            for i in short:
                if sum(widths) < room:
                    widths[i] += 1
    return widths


def _joined(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int], gap: int
) -> Iterator[str]:
    """Lines of one row, without blanks at their ends."""
    for number in range(max(map(len, cells))):
        parts = []
        for column, lines, width in zip(columns, cells, widths, strict=True):
            text = lines[number] if number < len(lines) else ""
            blanks = " " * (width - _length(text))
            parts.append(blanks + text if column.right else text + blanks)
        yield (" " * gap).join(parts).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    """Lines that end at blanks; a longer word stays whole."""
    lines = [
        textwrap.wrap(line, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]
        for line in text.split("\n")
    ]
    return [part for line in lines for part in line]


def _cut(text: str, width: int) -> str:
    from rich.cells import set_cell_size

    return text if _length(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def _length(text: str) -> int:
    """Columns of a terminal."""
    from rich.cells import cell_len

    return cell_len(text)
