"""The whole parity check of a bundle folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...runtime.bundle.float32_view import as_float32
from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.bundle.manifest_file import MANIFEST, read_manifest
from ...runtime.common.errors import ExportError
from ...runtime.families import FAMILIES
from ..checkpoint import Checkpoint
from ..common.memory import fits_whole, whole_parity_bytes
from ..drafts import left_out
from ..drafts.common.base import Draft
from ..families.common.base import Family
from ..families.common.layer_skip import disregarded
from ..families.registry import family_for
from ..quantization.blocks import LIMITS
from .capture import Captured, capture
from .compare import compare_graphs
from .errors import float32_errors
from .first_tokens import compare_first_tokens
from .generation import compare_generation
from .preparation import compare_preparation
from .recorded import compared_inputs, compared_rows, recorded_memory, row_counts
from .reference import load_exact, load_reference
from .runner import GraphRunner, stored_graph_memory

FIRST_TOKENS = 7
"""As many prompts are compared, each a token longer than the one before, where no generation is."""


def check_parity(
    bundle: Bundle | Path,
    checkpoint: Checkpoint,
    *,
    drafts: Sequence[Draft] = (),
    memory_limit: int | None = None,
    generation: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Compares every graph of the bundle with PyTorch and returns the manifest's `parity` entries.

    A bundle that is still being built has its manifest in memory only; of a folder the manifest is read and no file
    is checked.

    Graphs of drafts that are not among `drafts` are not compared; one whose matrices are integers is compared with the
    network that has the same numbers, and its row also says how far that is from the network as it was trained. Above `memory_limit` bytes of parameters (None: where
    the whole would not fit the memory that is available) both sides run layer by layer on chained inputs, with one
    layer's tensors in memory, and in place of a generation the first tokens behind several prompts are compared.
    Raises ExportError naming the graph and the difference when one is beyond its limit.
    """
    if isinstance(bundle, Path):
        bundle = Bundle(bundle, Manifest.from_dict(read_manifest(bundle / MANIFEST)))
    bundle = Bundle(
        bundle.path, as_float32(bundle.manifest)
    )  # the graphs that compute in float32, as PyTorch does here
    manifest, family = bundle.manifest, family_for(checkpoint)
    drafts = [draft.with_precision(_precision(manifest, draft)) for draft in drafts]
    stored = [draft.stored_as(manifest.weights_dtype) for draft in drafts]
    whole = [
        draft.with_precision(None).stored_as(manifest.weights_dtype) for draft in drafts if draft.precision
    ]
    length = compared_rows(manifest.limits.max_length)
    streamed = not fits_whole(_whole_bytes(bundle, family, length), memory_limit, manifest.weights.total)
    model = load_reference(checkpoint, manifest.weights_dtype, streamed=streamed)
    lm_head = any(draft.reads_lm_head for draft in drafts)
    exact = load_exact(checkpoint, manifest.weights_dtype)
    captures = []
    for kind, inputs in compared_inputs(family, length, streamed=streamed):
        captured = capture(model, family, kind, manifest.decoder.cuts, inputs, lm_head)
        captured.error = float32_errors(exact, family, manifest.decoder.cuts, inputs, captured)
        captured.without = _without(model, exact, family, manifest, kind, inputs)
        captures.append(captured)
    runner = GraphRunner(bundle.path, piecewise=streamed)
    parity_rows = compare_graphs(bundle, runner, captures, stored, whole, progress)
    runnable = manifest.model.family in FAMILIES
    if runnable:
        parity_rows.append(compare_preparation(bundle, family))
    realistic = captures[-1]
    del captures
    gc.collect()
    for row in parity_rows:
        if not row.ok:
            raise ExportError(
                f"parity failed: {row.graph} differs from {row.reference} by {row.max_abs_difference:.3g} "
                f"({row.relative_difference:.2g} of the largest value, {row.limit:.1e} allowed)"
            )
    if generation and streamed:
        parity_rows.append(compare_first_tokens(bundle, runner, family, realistic, min(length, FIRST_TOKENS)))
    elif generation and runnable:
        if progress:
            progress("generation", len(parity_rows), len(parity_rows) + 1)
        del runner
        parity_rows.append(compare_generation(bundle, family, model))
    entries = [row.to_dict() for row in parity_rows]
    if streamed:
        for entry in entries:
            entry["streamed"] = True
    return entries


def _without(
    model: Any, exact: Any, family: Family, manifest: Manifest, kind: str, inputs: Any
) -> Captured | None:
    """`Captured.without`, of the decoder in one piece; None where no draft leaves anything out."""
    skip, ends = left_out(manifest.drafts), (0, manifest.decoder.num_layers)
    if skip is None:
        return None
    with disregarded(family.language, family.parts(model).layers, skip):
        captured = capture(model, family, kind, ends, inputs)
    with disregarded(family.language, family.parts(exact).layers, skip):
        captured.error = float32_errors(exact, family, ends, inputs, captured)
    return captured


def _precision(manifest: Manifest, draft: Draft) -> str | None:
    """`Draft.precision` as the manifest says."""
    dtype = next((entry.weights_dtype for entry in manifest.drafts if entry.name == draft.name), None)
    return dtype if dtype in LIMITS else None


def _whole_bytes(bundle: Bundle, family: Family, length: int) -> int:
    graphs = [stored_graph_memory(bundle.path / graph.file) for graph in bundle.manifest.graphs.values()]
    recorded = recorded_memory(family, row_counts(family, length, streamed=False))
    return whole_parity_bytes(graphs, family.checkpoint.tensors.memory, recorded)
