"""The `imitation.n` graph of a trained imitation draft."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..families.base import GraphSpec
from ..graphs.compose import Composer
from ..graphs.hooks import export_hooks
from ..graphs.template import TraceInput, trace
from ..graphs.weights import WeightStore
from .imitation import ImitationDraft


class DraftTensors:
    """A draft's tensors under names that cannot collide with the target's."""

    def __init__(self, draft: ImitationDraft) -> None:
        self.prefix = f"draft.imitation.{draft.layer}."
        self._tensors = {self.prefix + k: v.detach() for k, v in draft.network.state_dict().items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def order(self, name: str) -> tuple[int, int]:
        """After every shard of the target."""
        return 1_000_000, list(self._tensors).index(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, float32."""
        return self._tensors[name]


def build_imitation(store: WeightStore, draft: ImitationDraft) -> GraphSpec:
    """`hidden` [batch, width, E] after layer n → `hidden_out`, which enters `head`."""
    tensors = DraftTensors(draft)
    store.add_reader(tensors)
    shape = ("batch", "width", draft.network.config.hidden_size)
    network = draft.network.eval().requires_grad_(False)
    with export_hooks():
        template = trace(
            network, lambda m, hidden: (m(hidden),), [TraceInput("hidden", shape)], ("hidden_out",)
        )
    name = f"imitation.{draft.layer}"
    graph = Composer(name, store)
    hidden = graph.input("hidden", "float32", shape)
    out = graph.call(template, "imitation", {"hidden": hidden}, tensors.prefix.__add__)["hidden_out"]
    graph.output("hidden_out", out, "float32", shape)
    return GraphSpec(name, "imitation", graph.model())
