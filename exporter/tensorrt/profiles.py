"""Optimisation profiles: which shapes a plan accepts, and which it is tuned for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...runtime.bundle.interfaces import DRAFT_LAYERS
from ...runtime.bundle.manifest import Manifest
from ...runtime.bundle.schema import ITEM_SIZES
from ...runtime.common.errors import ExportError
from ...runtime.decoder.forward_pass import PREFILL_WIDTH
from ...runtime.decoder.kv_cache import cache_len_step
from ...runtime.engines.device import ALIGNMENT
from ...runtime.images.processors import tiles
from ...runtime.images.processors.patches import settings_of

Range = tuple[int, int, int]
"""(smallest, tuned for, largest)"""

LEAST_BATCH = {"tensorrt-rtx": 2}
"""Sequences that the profiles of every pass reach at least. Where all are fixed at one, TensorRT-RTX 1.7 names two nodes of a
plan with several layers alike, and refuses its own graph; where some are, it keeps the weights twice."""

USUAL_UNITS = 256
"""Rows of a picture of 448 × 448 in a tower of any size, whose windows mostly hold 16."""


@dataclass(frozen=True)
class Sizes:
    """The limits of a bundle that profiles follow from."""

    max_length: int
    max_batch: int
    max_width: int
    max_source: int = 1
    verify_width: int = 6
    usual_source: int = 64
    max_units: int = 1
    max_windows: int = 1
    max_tiles: int = 1
    least_batch: int = 1

    @classmethod
    def of_manifest(cls, manifest: Manifest, backend: str = "tensorrt") -> Sizes:
        """From `limits`, `policy` and `text` of a manifest, and what a backend needs."""
        limits, image = manifest.limits, manifest.image
        units = limits.max_image_rows or 1
        windows = most_tiles = 1
        if image is not None and "image_grid_pinpoints" in image.extra:
            most_tiles = tiles.settings_of(image).most_tiles
        if image is not None and "window_size" in image.extra:
            windows = -(-units // settings_of(image)[0].window_side)  # of a picture as slim as it can be
        return cls(
            limits.max_length,
            limits.max_batch,
            limits.max_width,
            _aligned_source(manifest),
            verify_width=manifest.verify_width or manifest.policy.draft_length + 1,
            usual_source=(manifest.text.image_rows or 0) + 16,
            max_units=units,
            max_windows=windows,
            max_tiles=most_tiles,
            least_batch=LEAST_BATCH.get(backend, 1),
        )


def _aligned_source(manifest: Manifest) -> int:
    """Most rows that cross-attention sees: what it keeps of sequences that are decoded together begins at aligned
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
    prefill = _range(1, 128, min(PREFILL_WIDTH, sizes.max_length + sizes.max_width))
    verify = _range(1, sizes.verify_width, sizes.max_width)
    rows = _range(1, sizes.verify_width, sizes.max_batch * sizes.max_width)
    widths: list[tuple[str, Range, Range]] = [
        ("prefill", prefill, alone),
        ("token", (1, 1, 1), batch),
        ("verify", verify, rows),
    ]
    if role in ("vision", "encoder", "cross_kv"):
        units = _range(1, USUAL_UNITS, sizes.max_units)
        windows = _range(1, USUAL_UNITS // 16, sizes.max_windows)
        ranges = {"batch": alone, "source": source, "units": units, "windows": windows}
        if role == "vision":  # a picture that is cut into tiles mostly fills as many as there can be
            whole = sizes.max_units
            ranges |= {"tiles": (1, sizes.max_tiles, sizes.max_tiles), "rows": (1, whole, whole)}
        return [Profile("request", ranges)]
    if role == "adaptor":
        return [Profile("request", {"image_rows": _range(1, sizes.usual_source, sizes.max_length)})]
    if role == "commit":
        widths = [("verify", verify, rows)]
    elif role not in ("embed", "segment", "head", "fusion", *DRAFT_LAYERS) and not prompts:
        widths = widths[1:]  # other graphs of drafts see no prompt, and a prompt's mask comes from the host
    visual = sizes.max_batch + max(PREFILL_WIDTH, sizes.max_width)
    profiles = [
        Profile(
            name,
            {
                "batch": prefilled if name == "prefill" else batch,
                "source": source,
                "width": width,
                "span": verify,
                "sources": prefill if name == "prefill" else rows,
                "rows": wanted,
                "visual": (1, visual, visual),
            },
        )
        for name, width, wanted in widths
    ]
    return [p for p in profiles if p.name != "verify" or sizes.max_width > 1 or len(profiles) == 1]


def _range(low: int, usual: int, high: int) -> Range:
    return low, max(low, min(usual, high)), high
