"""The draft kind `eagle`: one decoder layer with keys and values of its own over [embedding, feature] (EAGLE, Li et al.,
arXiv 2401.15077; its dynamic trees: EAGLE-2, arXiv 2406.16858).

In a bundle it is the graph `eagle`, which reads the target's embedding table, final norm and, with `shared`, its LM head
as weights that are stored once: see `docs/architecture.md` for its inputs and outputs. Features that come from the
target pass the final norm in the graph; those that the layer gave itself (`drafted`) are features already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Run, TrainedKind
from .eagle_checkpoint import is_published, read_published
from .eagle_network import EagleConfig, EagleNetwork
from .files import DESCRIPTION
from .layer import LayerDraft, traced_layer
from .speculators_format import Verifier, eagle_checkpoint, model_type, read_eagle, read_verifier

if TYPE_CHECKING:
    import torch

    from ..families.base import Family, GraphSpec
    from ..graphs.template import Template
    from ..graphs.weights import WeightStore
    from ..parity.capture import Captured

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

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        return [self.layer_graph(store, family)]

    def traced(self) -> Template:
        from ..graphs.template import TraceInput

        shape = ("batch", "width", self.network.config.hidden_size)
        rows = [TraceInput("embedded", shape), TraceInput("features", shape)]
        return traced_layer(self.network, lambda net: net, rows, EagleNetwork.joined)

    def checkpoint(self, form: str, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return eagle_checkpoint(self.network, verifier)

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        for captured in captures:
            yield from self.layer_parity(run, captured)


class EagleKind(TrainedKind):
    """See the module."""

    name = EagleDraft.kind
    title = "a layer with its own keys and values that goes on from the last features"
    has_layer = False
    draft_length = 3

    def load(self, folder: Path) -> EagleDraft:
        """A folder of `vlmexport train`, or a checkpoint as the authors of EAGLE, or `speculators`, publish them."""
        if not self.recognises(folder):
            return EagleDraft.load(folder)
        target: dict[str, Any] = {"name": "", "fingerprint": None}
        if model_type(folder) is None:
            network = read_published(folder)
        else:
            network, verifier = read_eagle(folder), read_verifier(folder)
            target |= {"name": verifier.name or "", "architectures": list(verifier.architectures)}
        return EagleDraft(network=network, target=target, provenance={"checkpoint": folder.name})

    def recognises(self, folder: Path) -> bool:
        if (folder / DESCRIPTION).exists():
            return False
        return model_type(folder) == "eagle" or is_published(folder)
