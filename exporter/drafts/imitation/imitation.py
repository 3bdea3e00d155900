"""The imitation draft (FastVLM, arXiv 2510.22641 section 3): a small network after decoder layer n.

Its folder (see `files`) describes the network by
`{"hidden_size": 128, "num_linear": 2, "activation": "gelu", "norm": "layer_norm", "residual": true}`, and
`"attention_heads": 4` where it has attention.
In a bundle it is the graph `imitation.n`: `hidden` [batch, width, E] after layer n → `hidden_out`, which enters `head`. With
attention it also reads and writes keys and values of its own, one entry for every position of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..common.base import Run, SelfDraft, TrainedKind
from ..common.cached_parity import CachedParity, side_by_side
from ..common.trained import TrainedDraft
from ..eagle.layer_draft import cache_entry
from ..eagle.traced_layer import traced_with_cache
from .imitation_network import ImitationConfig, ImitationNetwork

if TYPE_CHECKING:
    from ...families.common.base import Family
    from ...families.common.parts import GraphSpec
    from ...graphs.traced_module import Template
    from ...graphs.weights import WeightStore
    from ...parity.capture import Captured


@dataclass(kw_only=True)
class ImitationDraft(TrainedDraft, SelfDraft):
    """A trained network after decoder layer `layer`."""

    network: ImitationNetwork
    layer: int  # pyright: ignore[reportGeneralTypeIssues]  # has no default here: it is always given

    kind = "imitation"
    has_layer = True

    @classmethod
    def untrained(cls, options: Mapping[str, Any]) -> ImitationNetwork:
        return ImitationNetwork(**asdict(ImitationConfig(**options)))

    def graph_names(self) -> dict[str, str]:
        return {"imitation": f"imitation.{self.layer}"}

    @property
    def attends(self) -> bool:
        """Whether its hidden states depend on those of earlier positions."""
        return self.network.config.attention_heads > 0

    def entry(self, weights_dtype: str) -> dict[str, Any]:
        entry, config = super().entry(weights_dtype), self.network.config
        if self.attends:
            entry["cache"] = cache_entry(config.attention_heads, config.head_dim, weights_dtype)
        return entry

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        from ...families.common.parts import GraphSpec
        from ...graphs.composer import Composer

        ((role, name),) = self.graph_names().items()
        tensors = self.stored_in(store, name)
        template = self._traced()
        graph = Composer(name, store, role)
        given = {each: graph.input(each) for each in template.inputs}
        made = graph.call(template, role, given, tensors.prefix.__add__)
        for each, value in made.items():
            graph.output(each, value)
        return [GraphSpec(name, role, graph.model())]

    def _traced(self) -> Template:
        """`hidden`, and with attention what a segment takes of places and its cache → `hidden_out`, `updated_*`."""
        from ...graphs.hooks import export_hooks
        from ...graphs.traced_module import TraceInput, trace

        network = self.network.eval().requires_grad_(False)
        hidden_input = TraceInput("hidden", ("batch", "width", self.network.config.hidden_size))
        if network.attention is None:
            with export_hooks():
                return trace(network, lambda m, hidden: (m(hidden),), [hidden_input], ("hidden_out",))

        def run(net: Any, hidden: Any, positions: Any, mask: Any, kept: Any) -> torch.Tensor:
            return net.mapped(net.attention(hidden, mask, net.attention.angles(positions), kept))

        heads, size = self.network.config.attention_heads, self.network.config.head_dim
        return traced_with_cache(
            network, network.attention.self_attn, (heads, size), [hidden_input], run, "hidden_out"
        )

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        from ...common.float64 import with_error

        for captured in captures:
            hidden = captured.residuals[self.layer]
            if self.attends:
                yield from self._attending_parity(run, hidden)
                continue
            expected, error = with_error(
                self.network, lambda net, hidden_states: net(hidden_states), [torch.from_numpy(hidden)]
            )
            yield "hidden", run({"hidden": hidden})["hidden_out"], expected.numpy(), error.numpy()

    def _attending_parity(
        self, run: Run, hidden: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        """Half of the exit hidden states [B, T, E] in one pass, the others behind them."""
        from ...common.float64 import with_error

        config, (batch, count, width) = self.network.config, hidden.shape
        kept = CachedParity(batch, count, config.attention_heads, config.head_dim)

        def layer(net: Any, hidden_states: Any, keys: Any, values: Any) -> torch.Tensor:
            return side_by_side(*net.behind(hidden_states, None if keys is None else (keys, values)))

        for start, end in ((0, count // 2), (count // 2, count)):
            part = hidden[:, start:end].copy()
            outputs = run({"hidden": part, **kept.inputs(start, end)})
            tensors = [torch.from_numpy(part), *kept.past]
            expected, error = with_error(self.network, layer, tensors, [None, *kept.off])
            out, out_error = (each[:, start:, :width].numpy() for each in (expected, error))
            yield "hidden", outputs["hidden_out"], out, out_error
            yield from kept.compared(outputs, expected, error, width)


class ImitationKind(TrainedKind):
    """See the module."""

    name = ImitationDraft.kind
    title = "a small network trained to stand for the other layers"
    has_layer = True

    def load(self, folder: Path) -> ImitationDraft:
        return ImitationDraft.load(folder)
