"""FastVLM's figure 6 for our drafts: acceptance by position in the answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
    for name, result in results.items():
        points = [(i, share) for i, share, count in result.by_position if count >= _LEAST]
        if points:
            axes.plot(*zip(*points, strict=True), label=f"{name} (alpha {result.alpha:.3f})", linewidth=1.2)
    axes.set(xlabel="position in the answer (token)", ylabel="share of drafts that the target accepts")
    axes.set_ylim(top=1.01)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
