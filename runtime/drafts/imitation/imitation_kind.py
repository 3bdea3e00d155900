"""The draft kind `imitation`."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...bundle.draft_kind import DraftKind, draft_with
from ...bundle.draft_options import DraftCache, DraftOptions
from ...bundle.schema import checked, optional
from ...common.errors import BundleError
from ...graphs.role import TOKEN, VERIFY, GraphRole, Values
from ...graphs.values import hidden_states, own_layer

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo, Manifest
    from ...decoder.decoder import Decoder
    from ...speculative.proposer import Proposer


@dataclass(kw_only=True)
class ImitationOptions(DraftOptions):
    """`cache` of a network with attention, null without."""

    cache: DraftCache | None = checked(optional(DraftCache.parse), default=None)

    @property
    def own_cache(self) -> DraftCache | None:
        return self.cache


def _network(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    draft = draft_with(manifest, "imitation", name)
    hidden = hidden_states(manifest)
    inputs: Values = {}
    outputs: Values = {}
    if draft is not None and (cache := draft.options.own_cache) is not None:
        if cache.num_layers != 1:
            raise BundleError(
                f"manifest field 'drafts': the cache of {draft.name!r} has {cache.num_layers} layers, the graph {name!r} "
                "has one; build the bundle again"
            )
        inputs, outputs = own_layer(manifest, cache)
    return inputs | {"hidden": hidden}, outputs | {"hidden_out": hidden}


def _propose(draft: DraftInfo, decoder: Decoder) -> Proposer:
    from .with_attention import imitation

    return imitation(draft, decoder)


NETWORK = GraphRole("imitation", _network, (TOKEN, VERIFY), timed=(TOKEN,), numbered=True, own_cache=True)
KIND = DraftKind("imitation", _propose, (NETWORK,), ImitationOptions)
