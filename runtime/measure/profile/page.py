"""A profile as one page to look at: plots and tables in a single HTML file that loads nothing."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...common.atomic_files import check_folder, write_file
from ...common.errors import OptionError
from ...common.optional_deps import need_extra

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #e3e5e8; --soft: #5a6068; --warning: #b26a00; --bar: #1f77b4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #16181b; --line: #34383e; --soft: #a2a9b2; --warning: #f0a840; --bar: #4f9bd4; }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink); background: var(--paper); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } .plots svg { flex: 1 1 22rem; max-width: 100%; height: auto; fill: currentColor; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } .note { color: var(--soft); } .warning { color: var(--warning); }
.best, .sum td { font-weight: bold; } details { margin: .5rem 0; }
.share { width: 10rem; } .share span { display: block; height: .7rem; background: var(--bar); }
.layers td:first-child { overflow-wrap: anywhere; } .layers td:not(:first-child) { white-space: nowrap; }
@media (max-width: 40rem) { .more { display: none; } th, td { padding: .2rem .35rem; } .share { width: 4rem; } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="note">{{ about }}</p>
{% for warning in warnings %}<p class="warning">{{ warning }}</p>{% endfor %}
<div class="plots">{% for plot in plots %}{{ plot }}{% endfor %}</div>
{% if drafts %}<h2>Speed-up at the best draft length, by acceptance</h2>
<p class="note">{{ measured }}</p>
<div class="scroll"><table>
<tr><th>acceptance</th>{% for name in drafts %}<th>{{ name }}</th>{% endfor %}</tr>
{% for acceptance, row in predictions.items() %}<tr><td>{{ acceptance }}</td>
{% for name in drafts %}<td>{% if row[name].draft_length %}{{ "%.2f" % row[name].speedup }} × at {{ row[name].draft_length }}
{% else %}none pays{% endif %}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% for name in drafts %}<details><summary>{{ name }}: tokens/s by acceptance and draft length</summary>
<div class="scroll"><table class="lengths">
<tr><th>acceptance</th>{% for length in lengths[name] %}<th>{{ length }}</th>{% endfor %}</tr>
{% for acceptance, row in predictions.items() %}<tr><td>{{ acceptance }}</td>
{% for length in lengths[name] %}<td{% if row[name].draft_length == length | int %} class="best"{% endif %}>
{{ "%.1f" % row[name].by_length[length] }}</td>{% endfor %}</tr>
{% endfor %}</table></div></details>{% endfor %}{% endif %}
<h2>Graphs (milliseconds)</h2>
<div class="scroll"><table>
<tr><th>graph</th><th>median</th><th class="share">share</th><th>95 %</th><th class="more">90 %</th><th class="more">99 %</th><th class="more">runs</th></tr>
{% for group in groups %}<tr class="sum"><td>{{ group.name }}</td><td>{{ "%.3f" % group.ms }}</td><td></td><td></td>
<td class="more"></td><td class="more"></td><td class="more"></td></tr>
{% for row in group.rows %}<tr><td>{{ row.graph }}</td><td>{{ "%.3f" % row.ms.p50 }}</td>
<td class="share"><span style="width: {{ "%.1f" % (100 * row.ms.p50 / group.ms if group.ms else 0) }}%"></span></td><td>{{ "%.3f" % row.ms.p95 }}</td>
<td class="more">{{ "%.3f" % row.ms.p90 }}</td><td class="more">{{ "%.3f" % row.ms.p99 }}</td><td class="more">{{ row.count }}</td></tr>
{% endfor %}{% endfor %}</table></div>
{% if layers %}<h2>Layers that take longest</h2>
<div class="scroll"><table class="layers"><tr><th>layer</th><th>type</th><th>graph</th><th>ms</th><th>share</th></tr>
{% for row in layers %}<tr><td>{{ row.name }}</td><td>{{ row.kind or "" }}</td><td>{{ row.graph }}</td><td>{{ "%.4f" % row.ms }}</td>
<td>{{ "%.0f" % (100 * row.share) }} %</td></tr>
{% endfor %}</table></div>{% endif %}
</body>
</html>
"""


def check_page(path: Path) -> None:
    """Raise `OptionError` when the page cannot be written; called before anything is timed."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"--html {path}: the name must end in .html")
    check_folder("--html", path)
    need_extra("eval", "--html")


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the page of a report of `report.build_report`, as a whole or not at all."""
    write_file(path, page(report))


def page(report: Mapping[str, Any]) -> str:
    """The page: names are data and are escaped, the plots are our own SVG."""
    from jinja2 import Environment
    from markupsafe import Markup

    template = Environment(autoescape=True).from_string(PAGE)
    layers = [
        {**layer, "graph": f"{row['graph']}, {row['width']}"}
        for row in report["graphs"]
        if row["profile"] in ("token", "request")
        for layer in row["layers"]
    ]
    return template.render(
        title=f"{report['model']}: {report['tokens_per_second']:.1f} tokens/s plain, {report['timed_with']}",
        about=about_line(report),
        warnings=warnings(report),
        plots=[Markup(_svg(draw, report)) for draw in (_passes, _drafts, _request)],
        measured=measured_line(report),
        drafts=list(report["drafts"]),
        predictions=by_acceptance(report),
        lengths={row["draft"]: list(row["by_length"]) for row in report["predictions"]},
        groups=_groups(report["graphs"]),
        layers=sorted(layers, key=lambda layer: -layer["ms"])[:20],
    )


def by_acceptance(report: Mapping[str, Any]) -> dict[float, dict[str, Any]]:
    """Acceptance → draft → its prediction."""
    predictions: dict[float, dict[str, Any]] = {}
    for row in report["predictions"]:
        predictions.setdefault(row["acceptance"], {})[row["draft"]] = row
    return dict(sorted(predictions.items()))


def about_line(report: Mapping[str, Any]) -> str:
    """What was timed, where."""
    return f"{report['timed_with']} on {report['device']}; {report['cache_rows']} rows of key/value cache, one sequence"


def warnings(report: Mapping[str, Any]) -> list[str]:
    """What a reader of these times should know first."""
    bound = [f"{row['graph']} ({row['width']})" for row in report["graphs"] if row["host_bound"]]
    lines = list(report["notes"])
    if bound:
        lines.append(
            f"Handing the pass to the GPU takes about as long as the pass itself: {', '.join(bound[:6])}"
        )
    return lines


def measured_line(report: Mapping[str, Any]) -> str:
    """Where the reader stands in the predictions: what acceptance was seen."""
    if not report["measured"]:
        return "No acceptance was measured: `vlmexport tune BUNDLE --data …` says which row holds for your requests."
    entries = [
        f"{draft} {row['acceptance']:.2f} ({_paying(row)}; {row['data']})"
        for draft, row in report["measured"].items()
    ]
    return f"Measured acceptance: {', '.join(entries)}"


def _paying(row: Mapping[str, Any]) -> str:
    return f"{row['speedup']:.2f} × at {row['draft_length']}" if row["draft_length"] else "no length pays"


def _groups(graphs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Graphs that run together, and what they take in all: of one pass, or of what a request needs once."""
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for row in graphs:
        groups.setdefault((row["profile"], None if row["profile"] == "request" else row["width"]), []).append(
            row
        )
    return [
        {
            "name": f"{profile}, all" if width is None else f"{profile}, {width} wide",
            "ms": sum(row["ms"]["p50"] for row in rows),
            "rows": rows,
        }
        for (profile, width), rows in groups.items()
    ]


def _svg(draw: Callable[[Any, Mapping[str, Any]], None], report: Mapping[str, Any]) -> str:
    """One plot. What matplotlib draws in black takes the page's colour, and its text is text: both follow the reader."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2, 3.8), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots(), report)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")


def _passes(axes: Any, report: Mapping[str, Any]) -> None:
    widths = [int(width) for width in report["passes"]]
    by_graph: dict[str, dict[int, float]] = {}
    for row in report["graphs"]:
        if row["profile"] in ("token", "verify") and (
            row["graph"] == "head" or row["graph"].startswith("segment")
        ):
            by_graph.setdefault(row["graph"], {})[row["width"]] = row["ms"]["p50"]
    floor = [0.0] * len(widths)
    for graph, times in sorted(
        by_graph.items(), key=lambda item: (item[0] == "head", item[0])
    ):  # as they run
        heights = [times.get(width, 0.0) for width in widths]
        axes.bar(widths, heights, bottom=floor, label=graph, width=0.7)
        floor = [low + high for low, high in zip(floor, heights, strict=True)]
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("positions in one pass")
    axes.set_ylabel("ms")
    axes.set_title("one pass of the target, T(q)", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _drafts(axes: Any, report: Mapping[str, Any]) -> None:
    axes.axhline(report["tokens_per_second"], color="black", linestyle="--", linewidth=1, label="plain")
    for name in report["drafts"]:
        predictions = [row for row in report["predictions"] if row["draft"] == name]
        (line,) = axes.plot(
            [row["acceptance"] for row in predictions],
            [row["tokens_per_second"] for row in predictions],
            marker="o",
            markersize=3,
            label=name,
        )
        measured = report["measured"].get(name)
        if measured is not None:
            axes.plot(
                measured["acceptance"],
                measured["tokens_per_second"],
                marker="D",
                markersize=9,
                color=line.get_color(),
            )
    if report["measured"]:
        axes.plot([], [], marker="D", linestyle="none", color="black", label="measured here")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("acceptance of a drafted token")
    axes.set_ylabel("tokens/s")
    axes.set_title("predicted, at the best draft length", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _request(axes: Any, report: Mapping[str, Any]) -> None:
    request, start = report["request"], 0.0
    for part, ms in request["ms"].items():
        if ms:
            axes.barh(0, ms, left=start, label=f"{part} {ms:.1f} ms")
            start += ms
    axes.set_yticks([])
    axes.set_xlabel("ms")
    drafted = f"{request['draft']} at {request['draft_length']}" if request["draft"] else "plain"
    axes.set_title(
        f"a request of {request['tokens']} tokens, {drafted},\nacceptance {request['acceptance']:g}",
        fontsize=10,
    )
    axes.set_ylim(-0.4, 1.6)  # above the bar: the legend
    axes.legend(fontsize=8, ncols=2, loc="upper center", frameon=False)
