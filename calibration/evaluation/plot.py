"""Plots of an evaluation: agreement by position in the answer (FastVLM's figure 6), acceptance by depth, right tokens by
rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.extras import need_extra
from .acceptance import Acceptance

_LEAST = 20  # answers that must reach a position for it to be drawn


def plot_by_position(results: Mapping[str, Acceptance], path: Path) -> None:
    """Draws one line per result into `path` (.png, .svg, .pdf). OptionError without matplotlib."""
    need_extra("eval", "--plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    _by_position(axes, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_all(results: Mapping[str, Acceptance], path: Path) -> None:
    """Agreement by position, acceptance by depth and right tokens by rank, side by side, into `path`. OptionError without matplotlib."""
    need_extra("eval", "--plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (position, depth, rank) = pyplot.subplots(1, 3, figsize=(15, 3.6), layout="constrained")
    _by_position(position, results)
    for name, result in results.items():
        if result.by_depth:
            depths, shares, _ = zip(*result.by_depth, strict=True)
            depth.plot(depths, shares, marker="o", markersize=3, label=name)
        for head, shares in enumerate(result.by_rank, 1):
            label = name if len(result.by_rank) == 1 else f"{name}, head {head}"
            rank.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=label)
    depth.set(xlabel="depth in the chain", ylabel="accepted / evaluated")
    rank.set(xlabel="r", ylabel="share of right tokens among the r likeliest")
    for axes in (depth, rank):
        axes.set_ylim(0, 1.01)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _by_position(axes: Any, results: Mapping[str, Acceptance]) -> None:
    for name, result in results.items():
        points = [(i, share) for i, share, count in result.by_position if count >= _LEAST]
        if points:
            axes.plot(*zip(*points, strict=True), label=f"{name} (alpha {result.alpha:.3f})", linewidth=1.2)
    # Of every position, in no cycle: behind a wrong token a draft is not asked.
    axes.set(xlabel="position in the answer (token)", ylabel="share of answers where the draft is right")
    axes.set_ylim(top=1.01)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)
    else:
        most = max((count for result in results.values() for *_, count in result.by_position), default=0)
        said = f"no position that {_LEAST} answers reach\n(at most {most} do): give more records"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", va="center", fontsize=8)
