"""What the draft kind `draft-and-verify` says in a manifest, and what its graphs look like from outside."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..bundle.draft_kind import draft_with
from ..bundle.draft_options import DraftOptions, DraftPasses, DraftShares
from ..bundle.schema import Part, checked, failure, integer, list_of, optional
from ..common.errors import BundleError
from ..graphs.decoding import layers_interface
from ..graphs.role import TOKEN, VERIFY, GraphRole, Values

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo, GraphInfo, Manifest


@dataclass(kw_only=True)
class SkippedInfo(Part):
    """Layers, from 0, whose attention and whose MLP a draft leaves out of the target's decoder."""

    attention: list[int] = checked(list_of(integer(0, 1023), 1024))
    mlp: list[int] = checked(list_of(integer(0, 1023), 1024))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SkipOptions(DraftOptions):
    """`skipped`: what it leaves out of the target."""

    skipped: SkippedInfo | None = checked(optional(SkippedInfo.parse), default=None)

    def check(self, where: str, draft: DraftInfo, manifest: Manifest) -> None:
        """Layers that the decoder has, each once, and not the attention of all."""
        count = manifest.decoder.num_layers
        if self.skipped is None:
            return
        for name, layers in (("attention", self.skipped.attention), ("mlp", self.skipped.mlp)):
            if layers != sorted(set(layers)) or (layers and layers[-1] >= count):
                raise failure(f"{where}.skipped.{name}", layers, f"rising numbers below num_layers ({count})")
        if len(self.skipped.attention) == count:
            raise failure(f"{where}.skipped.attention", self.skipped.attention, "fewer than all layers")

    def passes(self, draft: DraftInfo, first: Sequence[str]) -> DraftPasses:
        """The decoder with sublayers left out, and its head, for every token."""
        if self.skipped is None:
            return DraftPasses()
        return DraftPasses(propose=[*first, *draft.graphs.values(), "head"])

    def usual_shares(self, manifest: Manifest, head: float) -> DraftShares | None:
        if self.skipped is None:
            return None
        # Of a layer's parameters attention has 4 parts, the feed-forward network 8.
        parts = 4 * len(self.skipped.attention) + 8 * len(self.skipped.mlp)
        return DraftShares(propose=(1 - head) * (1 - parts / (12 * manifest.decoder.num_layers)) + head)


def skipped_by(manifest: Manifest) -> SkippedInfo | None:
    """What the draft with the graph `skipped` leaves out; None where there is none."""
    draft = draft_with(manifest, "skipped")
    return draft.options.skipped if draft is not None and isinstance(draft.options, SkipOptions) else None


def kept_attention(manifest: Manifest) -> list[int]:
    """Layers whose attention the graph `skipped` has. Raises `BundleError` where no draft says which it has not."""
    skipped = skipped_by(manifest)
    if skipped is None:
        raise BundleError("manifest field 'drafts': no draft names what the graph 'skipped' leaves out")
    return [layer for layer in range(manifest.decoder.num_layers) if layer not in skipped.attention]


def _layers(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    return layers_interface(manifest, range(manifest.decoder.num_layers), kept_attention(manifest))


def _cached_layers(manifest: Manifest, graph: GraphInfo) -> Sequence[int]:
    return kept_attention(manifest)


SKIPPED = GraphRole(
    "skipped", _layers, (TOKEN, VERIFY), timed=(TOKEN,), has_plan=False, cached_layers=_cached_layers
)
