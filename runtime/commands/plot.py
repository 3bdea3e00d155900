"""The plot of `vlmexport bench`: speed of both arms, acceptance by depth, cost by width."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..common.atomic_files import check_folder, write_file
from ..common.errors import OptionError
from ..common.optional_deps import need_extra
from ..hardware.machine import BUSY, busy
from ..measure.headline import headline

SUFFIXES = (".png", ".svg", ".pdf")
LINES = "lines: slowest and fastest run of plain decoding; smallest and largest quotient of a pair"
_PLAIN, _DRAFT = "#8a8f98", "#1f77b4"


def check_plot(path: Path) -> None:
    """Raise `OptionError` when the plot cannot be written; called before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    check_folder("--plot", path)
    need_extra("eval", "--plot")


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Draw a report of `benchmark.measure` into `path`, as a whole or not at all."""
    save_figure(draw_benchmark(report), path, 150)


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure of matplotlib in the format that the name of `path` ends in, as a whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=dpi)
    write_file(path, content.getvalue())


def draw_benchmark(report: dict[str, Any]) -> Any:
    """The figure (`matplotlib.figure.Figure`) of a report."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.94))  # type: ignore[union-attr]  # below: the machine
    FigureCanvasAgg(figure)
    speed, depth, width = figure.subplots(1, 3)
    _speed(speed, report)
    _depth(depth, report)
    _width(width, report)
    title = f"{report['model']} with {report['draft']['name']}\ndecoding {headline(report)}"
    if not report["output_is_text"]:
        title += f" (acceptance forced to {report['forced_acceptance']:g}: not text)"
    if report["lossy"] is not None:
        title += f" (LOSSY: {report['lossy']} acceptance)"
    figure.suptitle(title, fontsize=11)
    machine = report["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores"
    figure.text(0.995, 0.012, where, ha="right", va="bottom", fontsize=7, color=_PLAIN)
    note, colour = (LINES, _PLAIN) if not busy(machine) else (BUSY, "#b26a00")
    figure.text(0.005, 0.012, note, ha="left", va="bottom", fontsize=7, color=colour)
    return figure


def _speed(axes: Any, report: dict[str, Any]) -> None:
    arms = [("plain", report["plain"], _PLAIN), ("speculative", report["speculative"], _DRAFT)]
    for index, (_, arm, colour) in enumerate(arms):
        middle = arm["tokens_per_second"]
        ends = [[middle - arm["tokens_per_second_min"]], [arm["tokens_per_second_max"] - middle]]
        axes.bar(index, middle, yerr=ends, color=colour, width=0.6, capsize=4)
        axes.text(index, middle / 2, f"{middle:.0f}", ha="center", va="center", color="white")
    if report["bound"] is not None:
        bound = report["bound"]["decode"] * report["plain"]["tokens_per_second"]
        axes.plot([0.65, 1.35], [bound, bound], color="black", linestyle="--", linewidth=1)
        axes.text(0.62, bound, "bound", ha="right", va="center", fontsize=8)
    axes.set_xticks([0, 1], [name for name, _, _ in arms])
    axes.set_ylabel("tokens/s")
    axes.set_title("decoding", fontsize=10)


def _depth(axes: Any, report: dict[str, Any]) -> None:
    alphas = report["alpha_by_depth"]
    axes.bar(range(1, len(alphas) + 1), alphas, color=_DRAFT)
    axes.set_ylim(0, 1)
    axes.set_xlabel("depth")
    axes.set_ylabel("accepted / evaluated")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(
        "acceptance" if report["tau"] is None else f"acceptance, tau {report['tau']:.2f}", fontsize=10
    )


def _width(axes: Any, report: dict[str, Any]) -> None:
    widths = [int(width) for width in report["width_cost"]]
    axes.plot(widths, list(report["width_cost"].values()), marker="o", markersize=3, color=_DRAFT)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("width q")
    axes.set_ylabel("T(q) / T(1)")
    axes.set_title("cost of a pass", fontsize=10)
