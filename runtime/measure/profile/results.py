"""Times of one graph at one size, and trtexec's files read back."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import InputError
from ...common.foreign_errors import raise_if_foreign

LIMIT = 256 << 20
"""Bytes of a file that is read back."""

HOST_BOUND = 0.8
"""Share of its computing from which giving a pass to the GPU is what takes long."""

PERCENTILES = (50, 90, 95, 99)
TIMES, LAYERS, LAYER_INFO = ".times.json", ".profile.json", ".layers.json"


@dataclass(frozen=True)
class Layer:
    """One layer of a plan: milliseconds of a run, and its share of all layers; `kind` as TensorRT names it, None where the
    plan keeps names alone."""

    name: str
    ms: float
    share: float
    kind: str | None = None


@dataclass(frozen=True)
class Timing:
    """Milliseconds of runs of `graph` at `width`; `enqueue`: median of handing a run to the GPU, None on a CPU;
    `layer_count`: how many layers the plan has, None where nobody said so."""

    graph: str
    profile: str
    width: int
    milliseconds: Sequence[float]
    enqueue: float | None = None
    layers: Sequence[Layer] = ()
    layer_count: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def host_bound(self) -> bool:
        """Whether the host is what limits these runs."""
        return self.enqueue is not None and self.enqueue > HOST_BOUND * self.median

    def report(self) -> dict[str, Any]:
        """One row of the report."""
        ordered = sorted(self.milliseconds)
        return {
            "graph": self.graph,
            "profile": self.profile,
            "width": self.width,
            "count": len(ordered),
            "ms": {
                **{f"p{share}": percentile(ordered, share) for share in PERCENTILES},
                "min": ordered[0],
                "max": ordered[-1],
            },
            "enqueue_ms": self.enqueue,
            "host_bound": self.host_bound,
            "layer_count": self.layer_count,
            "layers": [
                {"name": each.name, "ms": each.ms, "share": each.share, "kind": each.kind}
                for each in self.layers
            ],
        }


def percentile(ordered: Sequence[float], share: int) -> float:
    """The smallest value that `share` percent of them do not exceed (nearest rank, as trtexec has it)."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def read_times(path: Path) -> tuple[list[float], float]:
    """(milliseconds of computing by run, median of handing one over) of a file of `trtexec --exportTimes`.

    Raises InputError for a file that is none, and for times that hold transfers: those of our buffers stay on the device.
    """
    records = _read(path)
    names = ("computeMs", "startEnqMs", "endEnqMs", "h2dMs", "d2hMs")
    if (
        not isinstance(records, list)
        or not records
        or not all(isinstance(record, dict) for record in records)
    ):
        raise InputError(f"{path} is no file of trtexec --exportTimes: not a list of runs")
    for record in records:
        for name in names:
            value = record.get(name)
            if type(value) not in (int, float) or not math.isfinite(value):
                raise InputError(f"{path} is no file of trtexec --exportTimes: {name} is {value!r:.40}")
    moved = statistics.median(record["h2dMs"] + record["d2hMs"] for record in records)
    if moved > 0:
        raise InputError(
            f"{path}: {moved:.3f} ms of a run are transfers, which the runtime does not make; time again with the commands "
            "of --save-commands (--noDataTransfers before TensorRT 11)"
        )
    if min(record["computeMs"] for record in records) <= 0:
        raise InputError(f"{path}: a run of no time")
    return [record["computeMs"] for record in records], statistics.median(
        record["endEnqMs"] - record["startEnqMs"] for record in records
    )


def read_layer_info(path: Path) -> dict[str, str | None]:
    """Name of a layer → its type, of a file of `trtexec --exportLayerInfo` (10.x, 11.x, TensorRT-RTX).

    A plan that was built as plans are by default keeps names alone: types are None. Raises InputError for a file that is none.
    """
    content = _read(path)
    layers = content.get("Layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        raise InputError(f"{path} is no file of trtexec --exportLayerInfo: it has no list of Layers")
    kinds: dict[str, str | None] = {}
    for layer in layers:
        name, kind = (layer.get("Name"), layer.get("LayerType")) if isinstance(layer, dict) else (layer, None)
        if not isinstance(name, str) or not (kind is None or isinstance(kind, str)):
            raise InputError(f"{path} is no file of trtexec --exportLayerInfo: a layer is {layer!r:.60}")
        kinds[name] = kind
    return kinds


def read_layers(path: Path, most: int = 8, kinds: Mapping[str, str | None] | None = None) -> list[Layer]:
    """The layers that take longest, of a file of `trtexec --exportProfile`; `kinds` as `read_layer_info` gives them. Raises
    InputError for a file that is none."""
    records = _read(path)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InputError(f"{path} is no file of trtexec --exportProfile: not a list of layers")
    layers = []
    for record in records:
        if "name" not in record:  # the first one counts the runs
            continue
        ms, share = record.get("averageMs"), record.get("percentage")
        if not all(type(value) in (int, float) and math.isfinite(value) for value in (ms, share)):
            raise InputError(f"{path} is no file of trtexec --exportProfile: a layer without times")
        name = str(record["name"])
        kind = (kinds or {}).get(name)
        layers.append(Layer(name[:200], float(ms), float(share) / 100, kind))  # type: ignore[arg-type]
    return sorted(layers, key=lambda layer: -layer.ms)[:most]


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > LIMIT:
            raise InputError(f"{path}: more than {LIMIT >> 20} MiB; time fewer iterations")
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise_if_foreign(error)
        raise InputError(f"{path} cannot be read: {error!s:.200}") from error
