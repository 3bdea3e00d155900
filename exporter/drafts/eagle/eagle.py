"""The draft kind `eagle`: one decoder layer with keys and values of its own over [embedding, feature] (EAGLE, Li et al.,
arXiv 2401.15077; its dynamic trees: EAGLE-2, arXiv 2406.16858).

In a bundle it is the graph `eagle`, which reads the target's embedding table, final norm and, with `shared`, its LM head
as weights that are stored once: see `docs/reference/graph-interfaces.md` for its inputs and outputs. Features that come from the
target pass the final norm in the graph; those that the layer gave itself (`drafted`) are features already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.published import PublishedKind
from ..common.verifier import Verifier
from . import eagle_checkpoint
from .eagle_checkpoint import EAGLE, authors_checkpoint, reader_notices
from .eagle_network import EagleConfig, EagleNetwork
from .layer_draft import LayerDraft
from .speculators_format import SPECULATORS, model_type, of_verifier, read_eagle
from .speculators_format import eagle_checkpoint as as_speculators
from .traced_layer import traced_layer

if TYPE_CHECKING:
    import torch

    from ...families.common.base import Family
    from ...graphs.traced_module import Template

D2T = "eagle.d2t"
"""Name in the manifest's `tensors` of a trimmed vocabulary's ids."""


@dataclass(kw_only=True)
class EagleDraft(LayerDraft):
    """A trained layer."""

    network: EagleNetwork

    kind = role = "eagle"

    @classmethod
    def untrained(cls, options: Mapping[str, Any]) -> EagleNetwork:
        return EagleNetwork(EagleConfig(**options))

    @property
    def drafter(self) -> EagleNetwork:
        return self.network

    def traced(self) -> Template:
        from ...graphs.traced_module import TraceInput

        shape = ("batch", "width", self.network.config.hidden_size)
        inputs = [TraceInput("embedded", shape), TraceInput("features", shape)]
        return traced_layer(self.network, lambda net: net, inputs, EagleNetwork.joined)

    def checkpoint(self, form: str, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if form == EAGLE:
            return authors_checkpoint(self.network, verifier)
        return (
            as_speculators(self.network, verifier)
            if form == SPECULATORS
            else super().checkpoint(form, verifier)
        )

    def export_notices(self, form: str, family: Family) -> list[str]:
        own = self.network.config
        if form == EAGLE:
            return [*super().export_notices(form, family), *reader_notices(own)]
        theirs, size = family.rotary_base or 10000.0, family.decoder.head_dim
        kind = (family.language.config.rope_parameters or {}).get("rope_type", "default")
        lines = super().export_notices(form, family)
        if (theirs, kind, size) == (own.rope_theta, "default", own.head_dim):
            return lines
        return [
            *lines,
            f"this layer's rotary positions have base {own.rope_theta:g} and {own.head_dim} units, as config.json says; the class "
            f"EagleSpeculator of speculators takes the model's ({kind}, base {theirs:g}, {size} units), and fails or gives "
            "other logits there",
        ]


class EagleKind(PublishedKind):
    """See the module."""

    name = EagleDraft.kind
    title = "a layer with its own keys and values that goes on from the last features"
    draft_length = 3
    forms = (SPECULATORS, EAGLE)
    draft = EagleDraft

    def is_published(self, folder: Path) -> bool:
        return model_type(folder) == "eagle" or eagle_checkpoint.is_published(folder)

    def read_published(self, folder: Path) -> tuple[Any, Mapping[str, Any]]:
        if model_type(folder) is None:
            return eagle_checkpoint.read_published(folder), {}
        return read_eagle(folder), of_verifier(folder)
