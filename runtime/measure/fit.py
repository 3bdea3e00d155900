"""Whether a bundle fits a device, and the tokens per second that its memory's bandwidth would allow: arithmetic, no measurement.

Decoding one sequence reads every weight of the decoder once per pass, whatever the width, so that a pass takes at least
its bytes divided by the bandwidth (the roofline of Williams et al., CACM 2009, at the intensity of one token).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..bundle.manifest import Manifest
from ..bundle.schema import ITEM_SIZES
from ..common.errors import BundleError, OptionError
from ..graphs.registry import graph_role
from ..hardware.devices import JETSON, RTX_TARGETS, Device, lowerings
from ..speedup.cost_model import CostTable
from ..speedup.predict import best_length, longest_drafts
from .inspection import cache_bytes, cross_kv_bytes_per_row, kv_bytes_per_token, state_bytes
from .pass_costs import cost_table, passes

CONTEXT_BYTES = 512 << 20
"""Set aside for the GPU's context and libraries, and for what a pass computes with."""

SYSTEM_BYTES = 2 << 30
"""Set aside for the system where it shares the memory."""

PLAN_DTYPE, PLAN_ITEM = "float16", 2
"""The type of a plan, float16 or bfloat16 unless it is asked to be float32, and the bytes of its numbers."""

NO_PLANS = (
    "no plan holds layers with linear attention yet: these are bounds of a plan that there is not; the bundle runs with "
    "device='cpu'"
)

DRAFT_BLOCK = 32
"""Integers of a draft that share a scale."""

FLOAT = "float"


def fit(
    manifest: Manifest, device: Device, *, length: int, batch: int, acceptance: float, most: int | None = None
) -> dict[str, Any]:
    """One device: bytes that are needed and there are, what can run there, tokens per second at the bandwidth's bound.

    `length`: tokens of each of `batch` sequences; `most`: as many as the model can have, None: any number. `longest` is
    the length with which it would fit, 0 where none does. `acceptance`: of a drafted token, for the drafts' best lengths.
    Raises BundleError for a bundle whose manifest does not count the numbers of its graphs.
    """
    stored = ITEM_SIZES[manifest.weights_dtype]
    held = replace(manifest, cache_dtype=PLAN_DTYPE)
    integers = stored_integers(manifest)
    limits = manifest.limits
    token_bytes = batch * kv_bytes_per_token(held)
    rows = (length + limits.max_width) * token_bytes
    needed = {
        "weights": (manifest.weights.total - integers) * PLAN_ITEM // stored + integers,
        "kv_cache": rows + batch * state_bytes(held, range(held.decoder.num_layers)),
        "cross_kv": batch * (limits.max_source or 0) * cross_kv_bytes_per_row(held),
        "context": CONTEXT_BYTES,
        "system": SYSTEM_BYTES if device.shared else 0,
    }
    total = sum(needed.values())
    longest = max(0, (device.memory - total + rows) // token_bytes - limits.max_width)
    table = roofline(manifest, device.bandwidth, length // 2)
    depths = longest_drafts(manifest, table)
    planless = manifest.decoder.linear_attention is not None
    drafts = {}
    for name in sorted(table.drafts):
        draft_length, speedup = best_length(table, name, acceptance, depths[name])
        drafts[name] = {
            "draft_length": draft_length, "speedup": speedup, "tokens_per_second": speedup / table.token_seconds(),
        }  # fmt: skip
    return {
        "device": device.name,
        "title": device.title,
        "weights": weights_kind(manifest),
        "memory": device.memory,
        "bandwidth": device.bandwidth,
        "needed": {**needed, "total": total},
        "fits": total <= device.memory,
        "left": device.memory - total,
        "longest": longest if most is None else min(longest, most),
        "plans": sorted({str(p.get("target")) for p in manifest.plans} & {device.capability, "native"}),
        "lowering": {} if planless else lowerings(device),
        "runs_with": NO_PLANS if planless else runs_with(device),
        "tokens_per_second": 1 / table.token_seconds(),
        "acceptance": acceptance,
        "drafts": drafts,
    }


def roofline(manifest: Manifest, bandwidth: float, filled: int) -> CostTable:
    """Pass times if reading the numbers of its graphs, and `filled` positions of the cache, at `bandwidth` were all
    there is. Drafts whose graphs are counted nowhere are left out."""
    counts = {name: graph.parameters for name, graph in manifest.graphs.items()}
    if any(counts[name] is None for name in (*manifest.segments, "head")):
        raise BundleError(
            "the manifest does not count the numbers of each graph, as those of older versions; build the bundle again"
        )
    held = replace(manifest, cache_dtype=PLAN_DTYPE)

    def seconds(graph: str) -> float:
        info = manifest.graphs[graph]
        layers = graph_role(info.role).cached_layers(manifest, info)
        kv_bytes = filled * cache_bytes(held, layers) + state_bytes(held, layers)
        floats = (info.parameters or 0) - (info.integers or 0) + scales(manifest, graph)
        return (PLAN_ITEM * floats + manifest.integer_bytes(graph) + kv_bytes) / bandwidth

    drafts = [
        draft for draft in manifest.drafts if all(counts.get(g) is not None for g in draft.graphs.values())
    ]
    made_of = passes(manifest, drafts, [manifest.limits.max_width], embed=False)
    return cost_table(drafts, {each: sum(map(seconds, graphs)) for each, graphs in made_of.items()})


def weights_kind(manifest: Manifest) -> str:
    """The target's weights as `--weights` names them; `float` where they are no integers."""
    own = manifest.target_weights
    return FLOAT if own is None else own.choice or own.dtype


def stored_integers(manifest: Manifest) -> int:
    """Bytes of all integers, each once. A draft without integers of its own reads the target's."""
    borrowing = {
        graph for draft in manifest.drafts if draft.weights_dtype is None for graph in draft.graphs.values()
    }
    own = {*manifest.segments, "head"} | (manifest.graphs.keys() - borrowing)
    return sum(manifest.integer_bytes(graph) for graph in own if graph in manifest.graphs)


def scales(manifest: Manifest, graph: str) -> int:
    """Numbers that the integers of a graph are multiplied by, one a block."""
    light = any(
        draft.weights_dtype is not None and graph in draft.graphs.values() for draft in manifest.drafts
    )
    target = manifest.target_weights
    block = DRAFT_BLOCK if light or target is None else target.block
    return (manifest.graphs[graph].integers or 0) // block


def runs_with(device: Device) -> str:
    """Which TensorRT makes plans for a device, from its makers' tables; none of it was run by us."""
    oldest = lowerings(device)
    if device.capability in JETSON:
        return (
            f"TensorRT on the device (`vlmexport compile --backend tensorrt`): native plans from {oldest['native']} on, "
            f"portable ones from {oldest['portable']} on"
        )
    onwards = (
        f"TensorRT on the device (--backend tensorrt --target native): native plans from 10.15 on, portable ones from "
        f"{oldest['portable'].removeprefix('TensorRT ')} on"
    )
    if device.capability in RTX_TARGETS:
        return f"TensorRT-RTX, built on any CPU (--backend tensorrt-rtx --target {device.capability}), or {onwards}"
    return onwards


def check_size(manifest: Manifest, length: int | None, batch: int) -> int:
    """The length that is meant: at most the bundle's. Raises OptionError beyond its limits."""
    limits = manifest.limits
    if length is not None and not 1 <= length <= limits.max_length:
        raise OptionError(f"--max-length {length}: the bundle has 1 to {limits.max_length}")
    if not 1 <= batch <= limits.max_batch:
        raise OptionError(f"--batch {batch}: the bundle has 1 to {limits.max_batch}")
    return limits.max_length if length is None else length
