"""What drafts with one decoder layer of their own share: their place in a manifest, their graph and its parity.

The layer is an `EagleNetwork`; a kind says what enters it beside embeddings and features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ....runtime.common.errors import ExportError
from ..common.cached_parity import CachedParity, side_by_side
from ..common.draft_tensors import DraftTensors
from ..common.top_k_outputs import compare_ranked, ranked
from ..common.trained import TrainedDraft
from .eagle_network import EagleNetwork

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...families.common.base import Family
    from ...families.common.parts import GraphSpec
    from ...graphs.composer import Composer
    from ...graphs.traced_module import Template
    from ...graphs.weights import WeightRef, WeightStore
    from ...parity.capture import Captured
    from ..common.base import Run

RANKS = 10
"""Proposals after each position: EAGLE-2's k."""

Beside = Callable[[np.ndarray], "tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]"]
"""Of places int64 [T]: further inputs of the graph [B, T, …], and the same as arguments of the network."""


@dataclass(kw_only=True)
class LayerDraft(TrainedDraft):
    """A trained draft whose graph `role` is a layer with keys and values of its own."""

    has_layer = False
    role: ClassVar[str]
    marks_drafted: ClassVar[bool] = True
    """Whether the graph is told which hidden states the layer gave itself."""
    inside: ClassVar[str] = ""
    """Prefix of the layer's tensors among those of `network`."""

    @property
    @abstractmethod
    def drafter(self) -> EagleNetwork:
        """The layer in `network`."""

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        return [self.layer_graph(store, family)]

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        for captured in captures:
            yield from self.layer_parity(run, captured)

    @property
    def reads_lm_head(self) -> bool:  # type: ignore[override]
        return self.drafter.config.head == "shared"

    @property
    def ranks(self) -> int:
        """Proposals after each position."""
        return min(RANKS, self.drafter.config.proposed)

    @property
    def d2t(self) -> str:
        """Name in the manifest's `tensors` of a trimmed vocabulary's ids."""
        return f"{self.role}.d2t"

    def check_vocabulary(self, family: Family) -> None:
        """Raises ExportError, naming both, unless the target has as many tokens as the one that the draft was made for."""
        own_size, target_size = self.drafter.config.vocab_size, family.language.head.shape[0]
        if own_size != target_size:
            raise ExportError(
                f"this draft was made for {own_size} tokens, the model has {target_size}; give one that was trained for this model"
            )

    def check_family(self, family: Family) -> None:
        super().check_family(family)
        self.check_vocabulary(family)

    def graph_names(self) -> dict[str, str]:
        return {self.role: self.role}

    def entry(self, weights_dtype: str) -> dict[str, Any]:
        config = self.drafter.config
        cache = cache_entry(config.num_kv_heads, config.head_dim, weights_dtype)
        vocabulary = None if config.trimmed is None else {"size": config.trimmed, "d2t": self.d2t}
        placed = {} if config.mrope_section is None else {"position": "mrope"}
        own = {"ranks": self.ranks, "cache": cache, "vocabulary": vocabulary, **placed}
        return super().entry(weights_dtype) | own

    def tensors(self, family: Family) -> dict[str, WeightRef]:
        """Two TensorRT plans cannot share a weight: the LM head of two graphs is handed to both."""
        config = self.drafter.config
        if config.trimmed is not None:
            return {self.d2t: self._d2t(config.trimmed)}
        return {"lm_head_table": family.language.head} if config.head == "shared" else {}

    def _d2t(self, size: int) -> WeightRef:
        from ...graphs.weights import WeightRef

        return WeightRef((f"{DraftTensors.PREFIX}{self.role}.{self.inside}d2t",), False, (size,), "int64")

    def layer_graph(
        self,
        store: WeightStore,
        family: Family,
        beside: Callable[[Composer], Mapping[str, ir.Value]] = lambda graph: {},
    ) -> GraphSpec:
        """The graph of the layer; `beside` makes what its template takes beside embeddings, features and what every
        segment takes. The draft's tensors are added to `store`."""
        from ...families.common.decoder_graphs import embeddings
        from ...families.common.parts import GraphSpec
        from ...graphs.composer import Composer
        from ...graphs.weights import WeightRef

        self.check_vocabulary(family)
        config, language = self.drafter.config, family.language
        tensors = self.stored_in(store, self.role)
        layer = self.traced()
        graph = Composer(self.role, store, self.role)
        inputs = dict(beside(graph))
        inputs |= {
            name: graph.input(name)
            for name in layer.inputs
            if name not in ("embedded", "features") and name not in inputs
        }
        hidden, source = (graph.input(name) for name in ("hidden", "feature_index"))
        features = self.features_of(graph, graph.node("Gather", [hidden, source], "rows", axis=0), family)
        inputs |= {
            "embedded": embeddings(graph, "next_ids", language.decoder.embedding_scale),
            "features": features,
        }
        outputs = graph.call(layer, "layer.0", inputs, tensors.prefix.__add__)
        for name, value in outputs.items():
            if name != "features_out":
                graph.output(name, value)
        features = outputs["features_out"]
        flat = graph.node(
            "Reshape", [features, graph.constant(np.array([-1, config.hidden_size], np.int64))], "flat"
        )
        head_input = graph.node("Gather", [flat, graph.input("row_index")], "asked", axis=0)
        head_input = self.before_head(graph, head_input, tensors.prefix.__add__)
        table = language.head
        if config.head != "shared":
            own = f"{tensors.prefix}{self.inside}head.weight"
            table = WeightRef((own,), False, (config.proposed, config.hidden_size))
        logits = graph.product(head_input, table, "logits")
        ids = None if config.trimmed is None else graph.weight(self._d2t(config.trimmed))
        graph.output("hidden_out", features)
        for name, value in ranked(graph, logits, self.ranks, ids).items():
            graph.output(name, value)
        return GraphSpec(self.role, self.role, graph.model())

    def features_of(self, graph: Composer, hidden_states: ir.Value, family: Family) -> ir.Value:
        """Features of `hidden_states`: the target's pass its final norm, those that the layer gave are some already."""
        with family.language.hooks():
            norm = family.language.final_norm
        return graph.node(
            "Where", [graph.input("drafted"), hidden_states, norm.applied(graph, hidden_states)], "features"
        )

    def export_notices(self, form: str, family: Family) -> list[str]:
        sections = self.drafter.config.mrope_section
        if sections is None:
            return []
        return [
            f"this layer's rotary positions have three axes (mrope_section {list(sections)}), as config.json says; who reads the "
            "checkpoint as a Llama's layer turns with one, and drafts less well behind pictures"
        ]

    def before_head(self, graph: Composer, hidden_states: ir.Value, name: Callable[[str], str]) -> ir.Value:
        """What the LM head reads of `hidden_states` [N, E] that the layer gave; `name` maps its parameters to stored tensors."""
        return hidden_states

    def parity_hidden(self, captured: Captured) -> tuple[np.ndarray, torch.Tensor, torch.Tensor | None]:
        """(hidden states [B, N, E] as the graph takes them, the features that they mean, how far those are from float64)."""
        hidden = captured.residuals[max(captured.residuals)]
        features, differs = captured.final(np.arange(hidden.shape[0] * hidden.shape[1], dtype=np.int64))
        return hidden, features.view(hidden.shape), differs.view(hidden.shape)

    @abstractmethod
    def traced(self) -> Template:
        """The layer with its cache: `embedded`, `features`, what a kind adds and what a segment takes → `features_out`,
        `updated_*` (`traced_layer`)."""

    def layer_parity(
        self, run: Run, captured: Captured, beside: Beside = lambda places: ({}, {})
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        """As `Draft.parity`: the target's features in one pass, then the layer's own behind them."""
        from ...common.float64 import with_error

        network, config = self.network, self.drafter.config
        hidden, features, differs = self.parity_hidden(captured)
        batch, count, width = hidden.shape
        first = count // 2
        embedded = torch.from_numpy(captured.embedded)
        table = None if captured.lm_head is None else torch.from_numpy(captured.lm_head)
        placed = None if config.axes == 1 else positions_with_axes(captured, config.axes)
        kept = CachedParity(batch, count, config.num_kv_heads, config.head_dim, placed)
        for start, end, drafted in ((0, first, False), (first, count, True)):
            places = np.arange(start, end, dtype=np.int64)
            source = np.arange(batch)[:, None] * count + places
            index = np.arange(batch * (end - start), dtype=np.int64)[::-3].copy()
            hidden_states = features.numpy() if drafted else hidden
            more, also = beside(places)
            outputs = run(
                {
                    "hidden": hidden_states.reshape(-1, width),
                    "feature_index": source,
                    **({"drafted": np.array([drafted])} if self.marks_drafted else {}),
                    "next_ids": captured.token_ids[:, start:end].copy(),
                    "row_index": index,
                    **kept.inputs(start, end),
                    **more,
                }
            )
            mask = torch.from_numpy(kept.seen(start, end)[None, None, :, :end].copy())
            positions = torch.from_numpy(kept.positions(start, end))

            def layer(net: Any, embedded: Any, features: Any, keys: Any, values: Any) -> torch.Tensor:
                before = None if keys is None else (keys, values)
                return side_by_side(*net(embedded, features, positions, mask, before, **also))  # noqa: B023

            tensors = [embedded[:, start:end], features[:, start:end]]
            errors = [None, None if drafted or differs is None else differs[:, start:end]]
            expected, error = with_error(network, layer, [*tensors, *kept.past], [*errors, *kept.off])
            out, out_error = expected[:, -(end - start) :, :width], error[:, -(end - start) :, :width]
            yield "rows", outputs["hidden_out"], out.numpy(), out_error.numpy()
            yield from kept.compared(outputs, expected, error, width)
            head_input = [each.reshape(-1, width)[index] for each in (out, out_error)]
            likely = lambda net, hidden_states, table: net.logits(hidden_states, table).log_softmax(-1)  # noqa: E731
            logits, logits_error = with_error(network, likely, [head_input[0], table], [head_input[1]])
            d2t = None if config.trimmed is None else self.drafter.d2t.numpy()
            yield from compare_ranked(outputs, logits.numpy(), logits_error.numpy(), d2t, config.vocab_size)


def positions_with_axes(captured: Captured, axes: int) -> np.ndarray:
    """Those of the target, int64 [axes, B, N]; of one whose positions count, the same on every axis."""
    if captured.positions is not None:
        return captured.positions
    batch, count = captured.token_ids.shape
    return np.broadcast_to(np.arange(count, dtype=np.int64), (axes, batch, count))


def cache_entry(num_kv_heads: int, head_dim: int, dtype: str) -> dict[str, Any]:
    """`cache` in a manifest's entry of a draft with one layer that keeps keys and values."""
    return {"num_layers": 1, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
