"""The report of `vlmexport bench`, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def show(report: dict[str, Any], out: Console) -> None:
    """Print the report for people."""
    from ..hardware.machine import BUSY, busy
    from ..measure.headline import headline
    from .table import Table

    plain, speculative, speedup = report["plain"], report["speculative"], report["speedup"]
    draft = report["draft"]
    trained = "" if draft["trained"] else " (untrained)"
    count, tokens = len(report["requests"]), sum(request["tokens"] for request in report["requests"])
    out.print(
        f"{report['model']}, {report['precision']}: draft {draft['name']}{trained}, {report['draft_length'] or 'adaptive'} "
        f"tokens per cycle; {count} request{'s' * (count > 1)}, {tokens} tokens, "
        f"{report['repeats']} interleaved repeats",
        markup=False,
    )
    out.print("" if report["note"] is None else f"{report['note']}\n", markup=False)
    table = Table()
    table.add_column("")
    for name in ("tokens/s", "min – max", "first token", "whole request"):
        table.add_column(name, justify="right")
    drafted = "speculative" if report["lossy"] is None else f"{report['lossy']}, LOSSY"
    for name, arm in (("plain", plain), (drafted, speculative)):
        table.add_row(
            name,
            f"{arm['tokens_per_second']:.1f}",
            f"{arm['tokens_per_second_min']:.1f} – {arm['tokens_per_second_max']:.1f}",
            f"{1e3 * arm['seconds_to_first_token'] / count:.1f} ms",
            f"{1e3 * arm['seconds'] / count:.1f} ms",
        )
    out.print(table)
    out.print(
        f"\nDecoding      {headline(report)}; {speedup['end_to_end']:.2f} times with image and prompt",
        style="bold",
    )
    out.print(_acceptance(report))
    bound = report["bound"]
    if bound is not None:
        out.print(
            f"Bound         {bound['decode']:.2f} ×: {bound['tokens_per_cycle']:.2f} tokens per cycle of "
            f"{1e3 * bound['cycle_seconds']:.2f} ms, against {1e3 * bound['token_seconds']:.2f} ms per token; "
            f"achieved {100 * report['achieved']:.0f} %"
        )
    inside = report["inside_engine"]
    if inside is not None:
        out.print(
            f"Host          {100 * plain['host_share']:.1f} % of plain decoding, {100 * speculative['host_share']:.1f} % "
            f"of speculative; inside the engine {inside:.2f} ×, achieved {100 * speedup['decode'] / inside:.0f} %",
            highlight=False,
        )
    if report["predicted"] is not None:
        share = speedup["decode"] / report["predicted"]
        out.print(
            f"Predicted     {report['predicted']:.2f} × by `vlmexport tune`; measured {100 * share:.0f} % of it"
        )
    elif report["unpredicted"] is not None:
        out.print(f"Predicted     nothing: {report['unpredicted']}", markup=False)
    widths = ", ".join(
        f"T({width}) {cost:.2f}" for width, cost in report["width_cost"].items() if width != "1"
    )
    out.print(f"Width cost    {widths} × T(1)", highlight=False)
    machine = report["machine"]
    load = "" if machine["load"] is None else f", load {machine['load']:.1f}"
    out.print(
        f"Machine       {machine['cpu']}, {machine['cores']} cores{load}, {machine['system']}", markup=False
    )
    if busy(machine):
        out.print(BUSY, style="yellow")
    if report["lossy"] is not None:
        out.print(
            f"Output        LOSSY ({report['lossy']} acceptance): not distributed as the model's; the speed-up is not that of "
            "lossless decoding",
            style="bold yellow",
        )
    elif report["identical"] is None and report["output_is_text"]:
        out.print("Output        distributed as the model's; another draw than plain decoding's")
    elif report["identical"] is None:
        pass
    elif report["identical"]:
        out.print("Output        identical to plain decoding, token for token", style="green")
    else:
        out.print("Output        NOT identical to plain decoding", style="bold red")
    if not report["output_is_text"]:
        out.print(
            f"Acceptance was forced to {report['forced_acceptance']:g}: drafts were accepted whatever "
            "they were. The output is not text, and the figures say nothing about a trained draft.",
            style="yellow",
        )


def _acceptance(report: dict[str, Any]) -> str:
    if report["alpha"] is None:
        return "Acceptance    nothing was drafted"
    depths = " ".join(f"{alpha:.2f}" for alpha in report["alpha_by_depth"])
    return f"Acceptance    alpha {report['alpha']:.2f}, tau {report['tau']:.2f} tokens per cycle; by depth {depths}"
