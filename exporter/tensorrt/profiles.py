"""Optimisation profiles: which shapes a plan accepts, and which it is tuned for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...runtime.bundle.manifest import Manifest
from ...runtime.bundle.schema import ITEM_SIZES
from ...runtime.common.errors import ExportError
from ...runtime.decoder.forward_pass import PREFILL_WIDTH
from ...runtime.decoder.kv_cache import cache_len_step
from ...runtime.engines.device import ALIGNMENT
from ...runtime.graphs.registry import graph_role
from ...runtime.graphs.role import PREFILL, REQUEST, TOKEN, VERIFY
from ...runtime.images.processors import dimensions

Range = tuple[int, int, int]
"""(smallest, tuned for, largest)"""

LEAST_BATCH = {"tensorrt-rtx": 2}
"""Sequences that the profiles of every pass reach at least. Where all are fixed at one, TensorRT-RTX 1.7 names two nodes of a
plan with several layers alike, and refuses its own graph; where some are, it keeps the weights twice."""


@dataclass(frozen=True)
class Sizes:
    """The limits of a bundle that profiles follow from."""

    max_length: int
    max_batch: int
    max_width: int
    max_source: int = 1
    max_block: int = 1
    verify_width: int = 6
    usual_source: int = 64
    least_batch: int = 1
    picture: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Symbolic dimensions of a picture of any size → (usual, largest)."""

    @classmethod
    def of_manifest(cls, manifest: Manifest, backend: str = "tensorrt") -> Sizes:
        """From `limits`, `policy` and `text` of a manifest, and what a backend needs."""
        limits = manifest.limits
        return cls(
            limits.max_length,
            limits.max_batch,
            limits.max_width,
            _aligned_source(manifest),
            manifest.decoder.max_block or 1,
            verify_width=manifest.verify_width or manifest.policy.draft_length + 1,
            usual_source=(manifest.text.image_rows or 0) + 16,
            least_batch=LEAST_BATCH.get(backend, 1),
            picture=dimensions(manifest.image, limits.max_image_rows or 1),
        )


def _aligned_source(manifest: Manifest) -> int:
    """Most tokens that cross-attention sees: what it keeps of sequences that are decoded together begins at aligned
    addresses, in the narrowest type."""
    limits, decoder = manifest.limits, manifest.decoder
    unit = cache_len_step(ALIGNMENT, decoder.num_heads * decoder.head_dim * ITEM_SIZES["float16"])
    most = limits.max_source or 1
    return most if limits.max_batch == 1 else -(-most // unit) * unit


@dataclass(frozen=True)
class Profile:
    """One profile: ranges of the symbolic dimensions."""

    name: str
    ranges: Mapping[str, Range]

    def shapes(self, shape: Sequence[int | str], tensor: str) -> tuple[tuple[int, ...], ...]:
        """(min, opt, max) shapes of one input."""
        missing = [d for d in shape if isinstance(d, str) and d not in self.ranges]
        if missing:
            raise ExportError(
                f"input {tensor!r} has the dimension {missing[0]!r}, for which no profile is known"
            )
        return tuple(tuple(self.ranges[d][k] if isinstance(d, str) else d for d in shape) for k in range(3))


def profiles_for(role: str, sizes: Sizes, prompts: bool = False) -> list[Profile]:
    """Profiles of a graph: prefill, one token, and up to `max_width` where the graph has a width. `prompts`: whether a graph of a
    draft is one that `reads_prompts`.

    Requests are read and prefilled one by one: only the passes that decode take a batch, but for what a backend needs
    (`LEAST_BATCH`). A plan keeps memory for the largest shape of any profile, which would else be a whole batch of the
    longest prompts.
    """
    batch, alone = (1, 1, max(sizes.max_batch, sizes.least_batch)), (1, 1, 1)
    prefilled = (1, 1, sizes.least_batch)
    source = _range(1, sizes.usual_source, sizes.max_source)
    prefill_width = max(PREFILL_WIDTH, sizes.max_block)
    prefill = _range(1, 128, min(prefill_width, sizes.max_length + sizes.max_width))
    verify = _range(1, sizes.verify_width, sizes.max_width)
    rows = _range(1, sizes.verify_width, sizes.max_batch * sizes.max_width)
    phases = graph_role(role).plan_phases(prompts)
    if REQUEST in phases:
        image_rows = _range(1, sizes.usual_source, sizes.max_length)
        ranges = {"batch": alone, "source": source, "image_rows": image_rows}
        return [Profile(REQUEST, ranges | {name: _range(1, *most) for name, most in sizes.picture.items()})]
    widths: dict[str, tuple[Range, Range]] = {
        PREFILL: (prefill, alone),
        TOKEN: ((1, 1, 1), batch),
        VERIFY: (verify, rows),
    }
    visual = sizes.max_batch + max(prefill_width, sizes.max_width)
    profiles = [
        Profile(
            name,
            {
                "batch": prefilled if name == PREFILL else batch,
                "source": source,
                "width": width,
                "span": verify,
                "sources": prefill if name == PREFILL else rows,
                "rows": rows_range,
                "visual": (1, visual, visual),
            },
        )
        for name, (width, rows_range) in widths.items()
        if name in phases
    ]
    return [p for p in profiles if p.name != VERIFY or sizes.max_width > 1 or len(profiles) == 1]


def _range(low: int, usual: int, high: int) -> Range:
    return low, max(low, min(usual, high)), high
