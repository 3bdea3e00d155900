"""Plots of an evaluation: agreement by position in the answer (FastVLM's figure 6), acceptance by depth, right tokens by
rank. A draft has one colour in all panels; its later heads are paler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runtime.commands.plot import check_plot, save_figure
from .acceptance import Acceptance

LEAST = 20
"""Answers that must reach a position, or proposals that must be judged at a depth or by a head, for a point to be drawn: a
share of fewer says little."""

_MARKED = {"marker": "o", "markersize": 3, "linewidth": 1.2}


def plot_by_position(results: Mapping[str, Acceptance], path: Path) -> None:
    """Draw one line per result into `path` (.png, .svg, .pdf). Raises `OptionError` without matplotlib."""
    check_plot(path)
    figure = _figure(7)
    _draw_positions(figure.subplots(), results)
    _save(figure, results, path)


def plot_all(results: Mapping[str, Acceptance], path: Path) -> None:
    """Agreement by position, acceptance by depth and right tokens by rank, side by side, into `path`. Raises `OptionError`
    without matplotlib."""
    check_plot(path)
    _save(drawn(results), results, path)


def drawn(results: Mapping[str, Acceptance]) -> Any:
    """The figure (`matplotlib.figure.Figure`) of all three panels."""
    figure = _figure(15)
    position, depth, rank = figure.subplots(1, 3)
    _draw_positions(position, results)
    _draw_depths(depth, results)
    _draw_ranks(rank, results)
    return figure


def _figure(width: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, results: Mapping[str, Acceptance], path: Path) -> None:
    """Write the figure, under it a legend of all drafts: of those, too, of which nothing can be drawn."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=_colour(at)) for at in range(len(results))]
    names = [f"{name} (alpha {result.alpha:.3f})" for name, result in results.items()]
    columns = max(1, int(figure.get_figwidth() // 3.5))
    figure.legend(lines, names, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    save_figure(figure, path, 130)


def _colour(draft: int) -> str:
    """Of the draft with this number, in every panel."""
    return f"C{draft}"


def _draw_positions(axes: Any, results: Mapping[str, Acceptance]) -> None:
    for at, result in enumerate(results.values()):
        _draw_line(axes, _judged(result.by_position), color=_colour(at), linewidth=1.2)
    # Of every position, in no cycle: behind a wrong token a draft is not asked.
    axes.set(xlabel="position in the answer (token)", ylabel="share of answers where the draft is right")
    most = max((count for result in results.values() for *_, count in result.by_position), default=0)
    _finish(axes, f"no position that {LEAST} answers reach\n(at most {most} do): give more records")


def _draw_depths(axes: Any, results: Mapping[str, Acceptance]) -> None:
    for at, result in enumerate(results.values()):
        _draw_line(axes, _judged(result.by_depth), color=_colour(at), **_MARKED)
    axes.set(xlabel="depth in the chain", ylabel="accepted / evaluated")
    most = max((count for result in results.values() for *_, count in result.by_depth), default=0)
    _finish(axes, f"no depth where {LEAST} proposals were judged\n(at most {most} were): give more records")


def _draw_ranks(axes: Any, results: Mapping[str, Acceptance]) -> None:
    several = False
    for at, result in enumerate(results.values()):
        for head, shares in enumerate(result.by_rank):
            if _places(result, head) >= LEAST:
                several |= head > 0
                paler = 1 - 0.75 * head / len(result.by_rank)
                points = [(rank, share) for rank, share in enumerate(shares, 1)]
                _draw_line(axes, points, color=_colour(at), alpha=paler, **_MARKED)
    axes.set(xlabel="r", ylabel="share of right tokens among the r likeliest")
    if several:
        axes.set_title("paler: later heads", fontsize=9)
    most = max((_places(result, 0) for result in results.values()), default=0)
    _finish(axes, f"no head that proposed {LEAST} tokens\n(at most {most}): give more records")


def _judged(points: Sequence[tuple[int, float, int]]) -> list[tuple[int, float]]:
    """(place, share) where enough was judged."""
    return [(place, share) for place, share, count in points if count >= LEAST]


def _places(result: Acceptance, head: int) -> int:
    """Positions for which a head proposes: none for the `head` first ones of an answer."""
    return sum(count for position, _, count in result.by_position if position > head)


def _draw_line(axes: Any, points: Sequence[tuple[int, float]], **style: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def _finish(axes: Any, nothing: str) -> None:
    """Axes of shares over whole numbers; the words where no line was drawn."""
    axes.set_ylim(0, 1.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if not axes.lines:
        axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", va="center", fontsize=8)
