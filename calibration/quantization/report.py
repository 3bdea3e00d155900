"""What `vlmexport quantize` says: `quantization.json` and `--json` (schema: `schemas/quantize-1.json`), and a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...exporter.quantization.choice import FLOAT, HEAD
from ...runtime.commands.output import size
from ...runtime.commands.table import Table
from ..data.reading.records import RecordSet
from ..targets.target import Target
from .layerwise import Group, Quantized
from .options import QuantizeOptions
from .packed import BITS, PackedTensors
from .quality import Quality

MOST_SENSITIVE = 5
"""Groups that the table shows."""


@dataclass(frozen=True)
class Measured:
    """Quality of the float model and of the integers, share of right facts of both (None without scenes), groups that were given 8
    bits for the quality, and seconds until here."""

    before: Quality
    after: Quality
    facts: tuple[float, float] | None
    widened: Sequence[Group]
    seconds: float


def document(
    target: Target,
    records: RecordSet,
    held: RecordSet,
    options: QuantizeOptions,
    quantized: Quantized,
    tensors: PackedTensors,
    measured: Measured,
    out: Path,
) -> dict[str, Any]:
    """One JSON object."""
    facts = measured.facts
    rate = quantized.numbers / quantized.cpu_seconds / 1e6 if quantized.cpu_seconds else None
    return {
        "schema_version": 1,
        "status": "quantized",
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "output": str(out),
        "weights": str(options.weights),
        "method": options.method,
        "block": options.block,
        "calibration": {**_records(records), "tokens": quantized.tokens},
        "held_out": {**_records(held), "tokens": measured.after.tokens},
        "quality": {
            "kl": measured.after.kl,
            "agreement": measured.after.agreement,
            "perplexity": measured.after.perplexity,
            "float_perplexity": measured.before.perplexity,
            "facts": None if facts is None else facts[1],
            "float_facts": None if facts is None else facts[0],
        },
        "max_loss": options.max_loss,
        "kinds": _kinds(target, quantized, tensors),
        "head": _head(quantized),
        "groups": [
            {
                "layer": group.layer,
                "modules": [_own_name(group, matrix.name) for matrix in group.matrices],
                "kinds": [_kind(quantized, matrix.name) for matrix in group.matrices],
                "error": max(group.errors.values(), default=None),
                "widened": group in measured.widened,
            }
            for group in quantized.groups
        ],
        "seconds": round(measured.seconds, 2),
        "million_numbers_per_core_second": None if rate is None else round(rate, 1),
    }


def table(told: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    quality = told["quality"]
    tokens = f"{told['held_out']['tokens']:,} held-out tokens"
    yield f"KL {quality['kl']:.5f} to the float model, best token equal at {quality['agreement']:.2%} of {tokens}"
    yield f"perplexity {quality['perplexity']:.3f}, float {quality['float_perplexity']:.3f}"
    if quality["facts"] is not None:
        yield f"right facts {quality['facts']:.2%}, float {quality['float_facts']:.2%}"
    yield ""
    kinds = Table()
    kinds.add_column("weights")
    for name in ("matrices", "numbers", "size"):
        kinds.add_column(name, justify="right")
    for kind, row in told["kinds"].items():
        kinds.add_row(kind, str(row["matrices"]), f"{row['numbers']:,}", size(row["bytes"]))
    yield from kinds.printed()
    worst = sorted(
        (g for g in told["groups"] if g["error"] is not None), key=lambda g: g["error"], reverse=True
    )
    if worst:
        yield ""
        sensitive = Table()
        sensitive.add_column("most sensitive", wrap=True)
        sensitive.add_column("weights")
        sensitive.add_column("error", justify="right")
        for group in worst[:MOST_SENSITIVE]:
            kinds_ = ", ".join(dict.fromkeys(group["kinds"]))
            sensitive.add_row(" ".join([group["layer"], *group["modules"]]), kinds_, f"{group['error']:.2%}")
        yield from sensitive.printed()
    widened = sum(group["widened"] for group in told["groups"])
    if told["max_loss"] is not None:
        yield f"in 8 bits for a KL of at most {told['max_loss']:g}: {widened} of {len(told['groups'])} groups"
    if told["head"]["tied"]:
        yield "the LM head is tied to the embedding table and stays float here; `vlmexport build --weights float,head=int8` rounds it"


def _kinds(target: Target, quantized: Quantized, tensors: PackedTensors) -> dict[str, dict[str, int]]:
    """Kind → matrices, numbers and bytes of the matrices; all else, floats, under `other`."""
    result = {kind: {"matrices": 0, "numbers": 0, "bytes": 0} for kind in (*BITS, FLOAT)}
    counted = 0
    for matrix in quantized.matrices:
        row = result[_kind(quantized, matrix.name)]
        taken = tensors.bytes_of(matrix.tensor)
        counted += taken
        row["matrices"] += 1
        row["numbers"] += matrix.numbers
        row["bytes"] += taken
    files = target.checkpoint.tensors
    numbers = sum(_count(files.shape(name)) for name in files) - sum(m.numbers for m in quantized.matrices)
    total = sum(map(tensors.bytes, tensors))
    rest = {"matrices": 0, "numbers": numbers, "bytes": total - counted}
    return {**{kind: row for kind, row in result.items() if row["matrices"]}, "other": rest}


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _head(quantized: Quantized) -> dict[str, Any]:
    group = next((group for group in quantized.groups if group.layer == HEAD), None)
    if group is None:
        return {"kind": FLOAT, "tied": True}
    return {"kind": _kind(quantized, group.matrices[0].name), "tied": False}


def _kind(quantized: Quantized, name: str) -> str:
    return quantized.integers[name].dtype if name in quantized.integers else FLOAT


def _own_name(group: Group, name: str) -> str:
    return name.removeprefix(f"{group.layer}.")


def _records(records: RecordSet) -> dict[str, Any]:
    return {"data": records.name, "count": len(records), "bad": len(records.problems)}
