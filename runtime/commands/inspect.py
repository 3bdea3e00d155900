"""`vlmexport inspect`: what is in a bundle, and whether it is whole."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import typer

from . import options

if TYPE_CHECKING:
    from rich.console import Console

    from ..bundle.folder import Bundle

log = logging.getLogger(__name__)


def inspect(
    bundle: options.Bundle,
    check: bool = typer.Option(False, "--check", help="Compare the SHA-256 of every file."),
    shapes: bool = typer.Option(False, "--shapes", help="Show the shape of every input and output."),
    as_json: options.AsJson = False,
) -> None:
    """Show what is in a bundle: graphs, weights, drafts, limits, parity, plans."""
    from ..bundle.folder import Bundle
    from ..measure.inspection import facts
    from .output import console, print_json
    from .verbose import log_bundle
    from .verbosity import is_quiet, is_verbose

    begin = time.perf_counter()
    opened = Bundle.open(bundle)
    log_bundle(opened, "size", time.perf_counter() - begin)
    checked = _compare(opened, quiet=as_json or is_quiet() or is_verbose()) if check else None
    report = facts(opened) | {"checked": {"sizes": len(opened.manifest.files), "sha256": checked}}
    if as_json:
        print_json(report)
    else:
        show(report, console(), shapes)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("inspect")(inspect)


def _compare(opened: Bundle, quiet: bool) -> int:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from .output import console

    total = sum(info.bytes for info in opened.manifest.files.values())
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("SHA-256", total=total)
        begun: dict[str, int] = {}

        def advance(name: str, size: int) -> None:
            if name not in begun:
                log.debug("comparing %s: %d bytes", name, opened.manifest.files[name].bytes)
            begun[name] = begun.get(name, 0) + size
            progress.update(task, advance=size, description=name)

        return opened.check_sums(progress=advance)


def show(report: dict[str, Any], out: Console, shapes: bool = False) -> None:
    """Print the facts of `inspection.facts` for people."""
    from ..bundle.certificate import Certificate
    from ..bundle.target_weights import TargetWeights
    from .output import picture_size, quantity, size
    from .plans import plans_tables
    from .table import Table

    model, decoder, limits, kv = report["model"], report["decoder"], report["limits"], report["kv"]
    head = Table()
    head.add_column(whole=True)
    head.add_column(wrap=True)
    row = head.add_row
    row("Bundle", report["path"])
    row("Model", f"{model['source']} ({model['architecture']}), {quantity(model['parameters'])} parameters, "
        f"{report['precision']}")  # fmt: skip
    if (origin := model["trained_from"]) is not None:
        row("Trained from", f"{origin['name']} ({origin['fingerprint'][:19]}): its weights changed with its draft, and so "
            "may its answers")  # fmt: skip
    if (adapter := model["adapter"]) is not None:
        row("Adapter", f"{adapter['name']} ({adapter['fingerprint'][:19]}), merged into the weights")
    row("Size", f"{size(report['bytes'])}: weights {size(report['weights']['bytes'])}, graphs "
        f"{size(_graph_bytes(report))}")  # fmt: skip
    cuts = decoder["cuts"]
    row("Decoder", f"{decoder['num_layers']} layers × {decoder['hidden_size']}, {decoder['num_heads']} heads "
        f"({decoder['num_kv_heads']} key/value), cut at {', '.join(map(str, cuts[1:-1])) or 'no layer'}")  # fmt: skip
    row(
        "Key/value cache",
        f"{size(kv['bytes_per_token'])} per token, {size(kv['bytes_per_sequence'])} for each sequence that is decoded "
        f"at a time{picture_size(kv['bytes_per_image'])}, {decoder['cache_dtype']}",
    )
    if any(graph["float32"] is not None for graph in report["graphs"]):
        row("Arithmetic", f"{report['compute_dtype']} rows between graphs; on a CPU weights become float32 when they are "
            "loaded, arithmetic and caches are float32")  # fmt: skip
    source = "" if limits.get("max_source") is None else f", {limits['max_source']} encoder rows"
    row(
        "Limits",
        f"{limits['max_length']} tokens, batch {limits['max_batch']}, width {limits['max_width']}{source}",
    )
    if report["image"] is not None:
        image = report["image"]
        row("Image", f"{image['width']} × {image['height']}, processor {image['processor']} → "
            f"{report['text']['image_rows']} rows")  # fmt: skip
    text = report["text"]
    chat = ", chat template" if text["chat_template"] else ""
    default = f", default prompt {text['default_prompt']!r}" if text["default_prompt"] is not None else ""
    row("Text", f"{text['vocab_size']} tokens{chat}{default}")
    row("Default", _policy(report))
    if generation := _generation(report["generation"]):
        row("Generation", generation)
    if report["target_weights"] is not None:
        row("Integers", TargetWeights.parse(report["target_weights"], "target_weights").sentence())
    if report["verify_width"] is not None:
        row("Verify width", str(report["verify_width"]))
    for entry in report["certificates"]:
        row("Certificate", Certificate.parse(entry, "certificates").sentence())
    producer = ", ".join(f"{name} {value}" for name, value in report["producer"].items())
    row("Made by", producer)
    row("Checked", _checked(report))
    out.print(head)

    graphs = Table("Graphs")
    for name in ("graph", "layers"):
        graphs.add_column(name, whole=True)
    graphs.add_column("inputs", wrap=True)
    graphs.add_column("outputs", wrap=True, drop=0 if shapes else 1)
    graphs.add_column("file", justify="right")
    for graph in report["graphs"]:
        layers = graph["layers"]
        span = "" if layers is None else _span(layers[0], layers[1] - 1)
        inputs, outputs = (_values(graph[side], shapes) for side in ("inputs", "outputs"))
        graphs.add_row(graph["name"], span, inputs, outputs, size(graph["bytes"]))
    out.print()
    out.print(graphs)

    drafts = Table("Drafts")
    drafts.add_column("draft", whole=True)
    drafts.add_column("kind", drop=1)
    for name in ("after layer", "trained", "weights", "default"):
        drafts.add_column(name, whole=True)
    for draft in report["drafts"]:
        policy = report["policy"]
        is_default = policy["speculative"] and draft["name"] == policy["draft"]
        layer = "" if draft["layer"] is None else str(draft["layer"])
        trained = "yes" if draft["trained"] else "no"
        weights = draft["weights_dtype"] or ""
        drafts.add_row(draft["name"], draft["kind"], layer, trained, weights, "yes" if is_default else "")
    if report["drafts"]:
        out.print()
        out.print(drafts)

    for entry in report["calibrated"]:
        out.print(_plain(_calibrated(entry)))
    for entry in report["acceptance"]:
        if entry["ranks"]:
            out.print(_plain(_ranks(entry)))
    if report["parity"]:
        worst = max(report["parity"], key=lambda entry: entry.get("max_abs_difference") or 0.0)
        out.print(
            f"\nCompared with PyTorch when it was built: {len(report['parity'])} graphs and outputs, largest difference "
            f"{worst.get('max_abs_difference', 0.0):.2g} ({worst.get('graph')})"
        )
    for table in plans_tables(report["plans"]):
        out.print()
        out.print(table)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _calibrated(entry: dict[str, Any]) -> str:
    where, choice = f"\nCalibrated for {entry['machine']}, {entry['threads']} threads: ", entry["choice"]
    if choice["draft"] is None:
        return f"{where}plain decoding, no draft pays"
    tree = f", trees of {choice['draft_nodes']}" if choice.get("draft_nodes") else ""
    line = f"{where}{choice['draft']}, {choice['draft_length']} deep{tree}"
    if None in (choice["speedup"], choice["tokens_per_cycle"], choice["break_even"]):
        return line
    between = "" if choice.get("interval") is None else " [{:.2f} – {:.2f}]".format(*choice["interval"])
    return (
        f"{line}; {choice['speedup']:.2f} ×{between} predicted at {choice['tokens_per_cycle']:.2f} tokens per cycle, "
        f"it pays above {choice['break_even']:.2f}"
    )


def _ranks(entry: dict[str, Any]) -> str:
    """Of a tree, how often the best, second best, … token of each depth was right."""
    depths = (
        " ".join(f"{right / judged:.3f}" for right, judged in ranks[:4] if judged) for ranks in entry["ranks"]
    )
    return f"  {entry['draft']}, tree of {entry['nodes']}: right by rank, depth by depth: {'; '.join(depths)}"


def _policy(report: dict[str, Any]) -> str:
    policy = report["policy"]
    if not policy["speculative"] or policy["draft"] is None:
        return "plain decoding"
    threshold = policy["confidence_threshold"]
    stop = "" if threshold is None else f", stops below confidence {threshold:g}"
    return f"speculative with {policy['draft']}, {policy['draft_length']} tokens per cycle{stop}"


def _generation(settings: dict[str, Any]) -> str:
    """What the model asks of decoding; empty where it asks nothing."""
    shown = []
    for name, value in settings.items():
        if isinstance(value, list) and value and name != "ignored":
            shown.append(f"{len(value)} {name.replace('_ids', '').replace('_', ' ')}")
        elif isinstance(value, int | float) and value != (1 if name == "repetition_penalty" else 0):
            shown.append(f"{name.replace('_', ' ')} {value:g}")
    if settings["ignored"]:
        shown.append(f"not taken over: {', '.join(settings['ignored'])}")
    return ", ".join(shown)


def _graph_bytes(report: dict[str, Any]) -> int:
    """Of all forms of all graphs."""
    files = {
        graph[form] for graph in report["graphs"] for form in ("file", "float32", "folded", "float32_folded")
    }
    return sum(report["files"][name]["bytes"] for name in files - {None})


def _checked(report: dict[str, Any]) -> str:
    sums = report["checked"]["sha256"]
    if sums is None:
        return f"{report['checked']['sizes']} files present with the right size (--check compares every byte)"
    return f"{sums} files, every SHA-256 as the manifest says"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _values(values: list[dict[str, Any]], shapes: bool) -> str:
    """Names, with shapes on request; numbered ones (`key_cache.0 … key_cache.11`) are folded into one."""
    groups: dict[tuple[str, str], list[int]] = {}
    for value in values:
        base, dot, number = value["name"].rpartition(".")
        numbered = bool(dot) and number.isdigit()
        shape = f" {'×'.join(map(str, value['shape']))} {value['dtype']}" if shapes else ""
        numbers = groups.setdefault((base if numbered else value["name"], shape), [])
        if numbered:
            numbers.append(int(number))
    parts = [
        name + (f".{_span(min(numbers), max(numbers))}" if numbers else "") + shape
        for (name, shape), numbers in groups.items()
    ]
    return "\n".join(parts) if shapes else ", ".join(parts)
