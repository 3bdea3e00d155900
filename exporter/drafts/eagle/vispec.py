"""The draft kind `vispec`: EAGLE's layer, which sees a picture as a few tokens and a global feature (ViSpec, arXiv
2509.15235).

In a bundle it is two graphs. `adaptor` reads a picture's embeddings once; `vispec` is the graph of an EAGLE layer with what the
adaptor gave as further hidden states to choose from: see `docs/reference/graph-interfaces.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....runtime.common.errors import ExportError
from ..common.base import Run
from ..common.draft_tensors import DraftTensors
from ..common.published import PublishedKind, plain_rotary_notices
from . import vispec_checkpoint
from .eagle_network import EagleNetwork
from .layer_draft import LayerDraft
from .traced_layer import traced_layer
from .vispec_network import VispecConfig, VispecNetwork

if TYPE_CHECKING:
    from ...families.common.base import Family
    from ...families.common.parts import GraphSpec
    from ...graphs.composer import Composer
    from ...graphs.traced_module import Template
    from ...graphs.weights import WeightStore
    from ...parity.capture import Captured

ADAPTOR = "adaptor"
UNSEEN_ROWS = 5
"""Rows of noise that parity gives the adaptor where a request has no picture."""


@dataclass(kw_only=True)
class VispecDraft(LayerDraft):
    """A trained layer with its adaptor."""

    network: VispecNetwork

    kind = role = "vispec"
    inside = "layer."

    @classmethod
    def untrained(cls, options: Mapping[str, Any]) -> VispecNetwork:
        return VispecNetwork(VispecConfig.of(options))

    @property
    def drafter(self) -> EagleNetwork:
        return self.network.layer

    def graph_names(self) -> dict[str, str]:
        return super().graph_names() | {ADAPTOR: ADAPTOR}

    def entry(self, weights_dtype: str) -> dict[str, Any]:
        return super().entry(weights_dtype) | {"queries": self.network.config.queries}

    def check_family(self, family: Family) -> None:
        check_family(family)
        super().check_family(family)

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        check_family(family)
        return [self.layer_graph(store, family, _visual), self._adaptor(store)]

    def traced(self) -> Template:
        from ...graphs.traced_module import TraceInput

        shape = ("batch", "width", self.network.config.hidden_size)
        inputs = [TraceInput(name, shape) for name in ("embedded", "features", "visual")]
        inputs.append(TraceInput("compressed", ("batch", "width"), torch.bool))
        return traced_layer(self.network, lambda net: net.layer, inputs, VispecNetwork.entering)

    def _adaptor(self, store: WeightStore) -> GraphSpec:
        """The graph `adaptor`; its tensors came to `store` with the layer's."""
        from ...families.common.parts import GraphSpec
        from ...graphs.composer import Composer
        from ...graphs.hooks import attention
        from ...graphs.traced_module import TraceInput, trace

        adaptor = self.network.imadpt.eval().requires_grad_(False)
        image_embeds = TraceInput("image_rows", ("rows", self.network.config.hidden_size))
        template = trace(
            adaptor,
            lambda net, image_embeds: (net(image_embeds, attention),),
            [image_embeds],
            ("visual_rows",),
        )
        graph = Composer(ADAPTOR, store, ADAPTOR)
        prefix = f"{DraftTensors.PREFIX}{self.role}.imadpt."
        outputs = graph.call(template, ADAPTOR, {"image_rows": graph.input("image_rows")}, prefix.__add__)
        graph.output("visual_rows", outputs["visual_rows"])
        return GraphSpec(ADAPTOR, ADAPTOR, graph.model())

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        for captured in captures:
            if graph == ADAPTOR:
                yield self._adaptor_parity(run, captured)
            else:
                yield from self.layer_parity(run, captured, self._seen(captured))

    def _adaptor_parity(self, run: Run, captured: Captured) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
        from ...common.float64 import with_error

        image_embeds = captured.image_embeds
        width = self.network.config.hidden_size
        if image_embeds is None:  # text alone
            image_embeds = np.random.default_rng(7).standard_normal((UNSEEN_ROWS, width), np.float32)
        image_embeds = image_embeds.reshape(-1, width)
        visual = run({"image_rows": image_embeds})["visual_rows"]
        expected, error = with_error(
            self.network,
            lambda net, image_embeds: net.imadpt(image_embeds),
            [torch.from_numpy(image_embeds.copy())],
        )
        return "visual rows", visual, expected.numpy(), error.numpy()

    def _seen(self, captured: Captured) -> Any:
        """For `layer_parity`: places before a picture, its tokens, and text behind it, in turn."""
        batch, width = len(captured.token_ids), self.network.config.hidden_size
        table = np.random.default_rng(6).standard_normal((4, width), np.float32)
        table[0] = 0

        def beside(places: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
            index = np.broadcast_to(places % 4, (batch, len(places))).copy()
            compressed = index == 2
            given = {"visual": table, "visual_index": index, "compressed": compressed}
            return given, {
                "visual": torch.from_numpy(table[index]),
                "compressed": torch.from_numpy(compressed),
            }

        return beside


def _visual(graph: Composer) -> dict[str, Any]:
    """What the adaptor gave, by place."""
    chosen = [graph.input("visual"), graph.input("visual_index")]
    return {"visual": graph.node("Gather", chosen, "seen", axis=0)}


def check_family(family: Family) -> None:
    """ExportError unless pictures stand among the embeddings that the decoder of `family` reads."""
    remedy = "give --draft eagle"
    if family.vision is None:
        raise ExportError(f"--draft vispec: {family.name} reads text only, so there is no picture; {remedy}")
    if family.decoder.cross_attention:
        raise ExportError(
            f"--draft vispec: the decoder of {family.name} sees pictures by cross-attention, not among its rows; {remedy}"
        )


class VispecKind(PublishedKind):
    """See the module."""

    name = VispecDraft.kind
    title = "an EAGLE layer that sees a picture as a few tokens and a global feature"
    draft_length = 3
    draft = VispecDraft

    def is_published(self, folder: Path) -> bool:
        return vispec_checkpoint.is_published(folder)

    def read_published(self, folder: Path) -> tuple[Any, Mapping[str, Any]]:
        return vispec_checkpoint.read_published(folder), {"notices": plain_rotary_notices(folder)}
