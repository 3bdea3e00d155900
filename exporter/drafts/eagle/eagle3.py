"""The draft kind `eagle3`: EAGLE's layer over hidden states of three of the target's layers, with a norm and a head of its own
(EAGLE-3, Li et al., arXiv 2503.01840).

In a bundle it is two graphs: `fusion` joins the hidden states after three cuts, `eagle3` is the layer, which reads what that gave, or
what it gave itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....runtime.common.errors import ExportError
from ..common.base import Run
from ..common.draft_tensors import DraftTensors
from ..common.published import PublishedKind
from ..common.verifier import Verifier
from . import eagle3_checkpoint
from .eagle3_network import ROWS, Eagle3Config, Eagle3Network
from .layer_draft import LayerDraft
from .speculators_format import SPECULATORS, model_type, of_verifier
from .traced_layer import traced_layer

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...families.common.base import Family
    from ...families.common.parts import GraphSpec
    from ...graphs.composer import Composer
    from ...graphs.traced_module import Template
    from ...graphs.weights import WeightStore
    from ...parity.capture import Captured

FUSION = "fusion"


@dataclass(kw_only=True)
class Eagle3Draft(LayerDraft):
    """A trained layer."""

    network: Eagle3Network

    kind = role = "eagle3"
    marks_drafted = False

    @classmethod
    def untrained(cls, options: Mapping[str, Any]) -> Eagle3Network:
        return Eagle3Network(Eagle3Config(**options))

    @property
    def drafter(self) -> Eagle3Network:
        return self.network

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.network.config.taps or ())))

    def fitted(self, num_layers: int) -> Eagle3Draft:
        taps = self.network.taps(num_layers)
        if taps[-1] >= num_layers:
            raise ExportError(
                f"this draft reads rows after layers {', '.join(map(str, taps))}, the model has {num_layers} layers"
            )
        network = self.network
        network.config = replace(network.config, taps=taps)
        return self

    def graph_names(self) -> dict[str, str]:
        return super().graph_names() | {FUSION: FUSION}

    def entry(self, weights_dtype: str) -> dict[str, Any]:
        return super().entry(weights_dtype) | {"taps": list(self.network.config.taps or ())}

    def checkpoint(self, form: str, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if form != SPECULATORS:
            return super().checkpoint(form, verifier)
        return eagle3_checkpoint.speculators_checkpoint(self.network, verifier)

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        return [self.layer_graph(store, family), self._fusion(store)]

    def traced(self) -> Template:
        from ...graphs.traced_module import TraceInput

        shape = ("batch", "width", self.network.config.hidden_size)
        inputs = [TraceInput("embedded", shape), TraceInput("features", shape)]
        return traced_layer(self.network, lambda net: net, inputs, Eagle3Network.joined)

    def features_of(self, graph: Composer, hidden_states: ir.Value, family: Family) -> ir.Value:
        return hidden_states  # those of the target are joined already

    def before_head(self, graph: Composer, hidden_states: ir.Value, name: Any) -> ir.Value:
        from transformers.models.llama import modeling_llama

        from ...graphs.hooks import export_hooks
        from ...graphs.traced_module import TraceInput, trace

        shape = ("rows", self.network.config.hidden_size)
        with export_hooks(rms_norms=(modeling_llama.LlamaRMSNorm,)):
            norm = trace(
                self.network.eval().requires_grad_(False),
                lambda net, features: (net.norm(features),),
                [TraceInput("rows", shape)],
                ("normed",),
            )
        return graph.call(norm, "norm", {"rows": hidden_states}, name)["normed"]

    def _fusion(self, store: WeightStore) -> GraphSpec:
        """The graph `fusion`; its tensor came to `store` with the layer's."""
        from ...families.common.parts import GraphSpec
        from ...graphs.composer import Composer
        from ...graphs.traced_module import TraceInput, trace

        shape = ("batch", "width", self.network.config.hidden_size)
        template = trace(
            self.network.eval().requires_grad_(False),
            lambda net, *hidden_states: (net.fused(*hidden_states),),
            [TraceInput(name, shape) for name in ROWS],
            ("hidden_out",),
        )
        graph = Composer(FUSION, store, FUSION)
        prefix = f"{DraftTensors.PREFIX}{self.role}."
        outputs = graph.call(template, FUSION, {name: graph.input(name) for name in ROWS}, prefix.__add__)
        graph.output("hidden_out", outputs["hidden_out"])
        return GraphSpec(FUSION, FUSION, graph.model())

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        for captured in captures:
            if graph == FUSION:
                yield self._fusion_parity(run, captured)
            else:
                yield from self.layer_parity(run, captured)

    def parity_hidden(self, captured: Captured) -> tuple[np.ndarray, torch.Tensor, torch.Tensor | None]:
        with torch.no_grad():
            features = self.network.fused(*map(torch.from_numpy, self._taps(captured)))
        return features.numpy(), features, None

    def _taps(self, captured: Captured) -> list[np.ndarray]:
        assert self.network.config.taps is not None, "ask fitted first"
        return [captured.residuals[tap] for tap in self.network.config.taps]

    def _fusion_parity(self, run: Run, captured: Captured) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
        from ...common.float64 import with_error

        hidden_states = self._taps(captured)
        output = run(dict(zip(ROWS, hidden_states, strict=True)))["hidden_out"]
        tensors = [torch.from_numpy(each) for each in hidden_states]
        expected, error = with_error(
            self.network, lambda net, *hidden_states: net.fused(*hidden_states), tensors
        )
        return "rows", output, expected.numpy(), error.numpy()


class Eagle3Kind(PublishedKind):
    """See the module."""

    name = Eagle3Draft.kind
    title = "a layer like EAGLE's that reads rows of three layers"
    draft_length = 3
    forms = (SPECULATORS,)
    draft = Eagle3Draft

    def is_published(self, folder: Path) -> bool:
        return eagle3_checkpoint.is_published(folder)

    def read_published(self, folder: Path) -> tuple[Any, Mapping[str, Any]]:
        """As the authors of EAGLE-3, ModelOpt or speculators publish them."""
        target = {} if model_type(folder) is None else of_verifier(folder)
        return eagle3_checkpoint.read_published(folder), target
