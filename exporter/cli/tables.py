"""What `build` and `verify` print for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...runtime.commands.output import picture_size, quantity, size
from ...runtime.commands.table import Table

if TYPE_CHECKING:
    from ..parity.verify import VerifyReport
    from ..pipeline.dry_run import DryRun


def dry_run_tables(dry_run: DryRun) -> list[Any]:
    """The dry run as rich tables."""
    table = Table(
        f"{dry_run.model}: {dry_run.architecture}, {dry_run.num_layers} decoder layers, cut at {dry_run.cuts}"
    )
    table.add_column("graph", whole=True)
    for name in ("layers", "nodes", "parameters", "weights"):
        table.add_column(name, justify="right")
    for graph in dry_run.graphs:
        layers = "" if graph.layers is None else f"{graph.layers[0]}–{graph.layers[1] - 1}"
        table.add_row(
            graph.name,
            layers,
            str(graph.nodes),
            quantity(graph.parameters) if graph.parameters else "",
            size(graph.weight_bytes) if graph.weight_bytes else "",
        )
    totals = Table()
    totals.add_column(whole=True)
    totals.add_column(wrap=True)
    for label, value in (
        ("drafts", draft_names(dry_run.drafts, dry_run.draft_precisions, dry_run.speculative)),
        ("parameters", f"{quantity(dry_run.parameters)} + {quantity(dry_run.draft_parameters)} of drafts"),
        ("bundle", bundle_size(dry_run.bundle_bytes, dry_run.linked_bytes)),
        (
            "key/value cache",
            f"{size(dry_run.kv_bytes_per_token)} per token, {size(dry_run.peak_memory.cache)} per sequence{picture_size(dry_run.kv_bytes_per_image)}",
        ),
        ("peak memory, build", f"about {size(dry_run.peak_memory.build)} (parity {dry_run.parity})"),
        ("peak memory, run", f"about {size(dry_run.peak_memory.run)} with one sequence at a time"),
        (
            "time of a build",
            f"about {_span(dry_run.seconds)} of computing on this machine, and the disk's own time",
        ),
    ):
        totals.add_row(label, value)
    return [table, totals]


def draft_names(names: Iterable[str], precisions: Mapping[str, str], speculative: bool) -> str:
    """A line of drafts, with the precision of those that have one of their own."""
    named = (f"{name} ({precisions[name]})" if name in precisions else name for name in names)
    return (", ".join(named) or "none") + ("" if speculative else " (speculation off)")


def bundle_size(total: int, linked: int) -> str:
    """Of a whole bundle, and what of it takes no further disk."""
    return size(total) + (f", {size(linked)} of it the model's own files" if linked else "")


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


TOKENS = {"generation": "generated tokens", "first tokens": "first tokens"}
"""Rows of parity that compare tokens and no graph → what those are."""


def parity_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Parity entries as they stand in the manifest."""
    table = Table("Parity on random and realistic inputs: float32, differences from float64")
    table.add_column("graph", whole=True)
    table.add_column("reference", whole=True, drop=2)
    table.add_column("values", justify="right", drop=1)
    for name in ("PyTorch's", "graph's", "relative", "limit"):
        table.add_column(name, justify="right")
    for row in rows:
        if row["graph"] in TOKENS:
            table.add_row(row["graph"], row["reference"], f"{row['values']} tokens", "", "equal", "", "")
            continue
        table.add_row(
            row["graph"], row["reference"], f"{row['values']:,}",
            "" if row.get("torch_difference") is None else f"{row['torch_difference']:.1e}",
            f"{row['max_abs_difference']:.1e}", f"{row['relative_difference']:.1e}",
            f"{row['limit']:.1e}" if row["limit"] else "0",
        )  # fmt: skip
    return table


def parity_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Parity in one line: how near the limit the graph comes that is nearest."""
    graphs = {row["graph"] for row in rows} - {"preparation", *TOKENS}
    shares = {
        row["graph"]: row["relative_difference"] / row["limit"]
        for row in rows
        if row["limit"] and row["graph"] in graphs
    }
    worst = max(shares, key=shares.__getitem__, default=None)
    closeness = (
        "no difference"
        if worst is None or not shares[worst]
        else (f"largest difference {100 * shares[worst]:.2g} % of its limit ({worst})")
    )
    texts = "".join(
        f"; {row['values']} {TOKENS[row['graph']]} equal" for row in rows if row["graph"] in TOKENS
    )
    number = f"{len(graphs)} graph{'s' * (len(graphs) != 1)}"
    return f"{number} compared with PyTorch: {closeness}{texts}"


def quantization_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for every graph whose matrices are integers: how far that takes it from the network as it was trained."""
    return [
        f"{row['graph']}: its integers change what it computes by up to {row['quantization_difference']:.2g} of the largest value; "
        "the table compares it with the network of the same integers"
        for row in rows
        if row.get("quantization_difference") is not None
    ]


def verify_tables(report: VerifyReport) -> list[Any]:
    """The report as rich renderables."""
    shown: list[Any] = [f"{report.bundle}: {report.files_checked} files match their checksums"]
    if report.parity:
        shown += [parity_table(report.parity), *quantization_notes(report.parity)]
    if report.lossless:
        table = Table("Plain against speculative decoding")
        table.add_column("draft", whole=True)
        for name in ("requests", "tokens", "different", "near ties", "alpha", "tau"):
            table.add_column(name, justify="right")
        for row in report.lossless:
            table.add_row(
                row.draft, str(row.requests), str(row.tokens), str(row.different), str(len(row.near_ties)),
                "–" if row.alpha is None else f"{row.alpha:.2f}", "–" if row.tau is None else f"{row.tau:.2f}",
            )  # fmt: skip
        shown.append(table)
    if report.certificate is not None:
        shown.append(f"Certificate: {report.certificate.sentence()}")
    return shown + report.notes + report.failures
