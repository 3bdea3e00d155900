"""The draft kind `medusa`: heads on the target's last hidden state (Cai et al., arXiv 2401.10774; on ViT-GPT2 captioning too).

In a bundle it is the graph `medusa`: `hidden` [batch, width, E] before the final norm and `row_index` [rows] → the best
`token_ids` and their `log_probabilities`, both [rows, heads, ranks]. The heads read the target's own norm, and with
`shared` its LM head, as weights that are stored once. The manifest's `tree` grows from the hits that were measured by
rank after training; without them the runtime grows trees by the heads' own probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....runtime.common.errors import ExportError
from ....runtime.drafts.medusa.static_tree import grow
from ..common.base import Run
from ..common.published import PublishedKind
from ..common.top_k_outputs import compare_ranked, ranked
from ..common.trained import TrainedDraft
from ..common.verifier import Verifier
from . import medusa_checkpoint, vllm_format
from .medusa_network import MedusaConfig, MedusaHeads

if TYPE_CHECKING:
    from ...families.common.base import Family
    from ...families.common.parts import GraphSpec
    from ...graphs.weights import WeightRef, WeightStore
    from ...parity.capture import Captured

ROLE = "medusa"
RANKS = 10
"""Proposals of each head, as in the published trees."""

NODES = 63
"""Nodes of the tree in a manifest: that of the paper has so many; smaller budgets take the first ones."""


@dataclass(kw_only=True)
class MedusaDraft(TrainedDraft):
    """Trained heads. `evaluation["hits"][k][r]` is how often rank r of head k + 1 was right, where it was measured."""

    network: MedusaHeads

    kind = "medusa"
    has_layer = False

    @classmethod
    def untrained(cls, options: Mapping[str, Any]) -> MedusaHeads:
        return MedusaHeads(MedusaConfig(**options))

    @property
    def reads_lm_head(self) -> bool:  # type: ignore[override]
        return self.network.config.head == "shared"

    @property
    def ranks(self) -> int:
        """Proposals of each head."""
        return min(RANKS, self.network.config.proposed or RANKS)

    @property
    def tree(self) -> list[int] | None:
        """Parents of the likeliest paths by measured hits, in their order of growth; None where none were measured."""
        hits = self.evaluation.get("hits")
        if hits is None:
            return None
        heads = self.network.config.heads
        known = isinstance(hits, list) and len(hits) == heads and all(isinstance(h, list) for h in hits)
        if not known or not all(type(x) in (int, float) and 0 <= x <= 1 for head in hits for x in head):
            raise ExportError(
                f"the draft's evaluation: hits {hits!r:.80} are not shares by rank of {heads} heads"
            )
        scores = [[math.log(x) if x else -math.inf for x in head[: self.ranks]] for head in hits]
        return grow(scores, NODES) or None

    def checkpoint(self, form: str, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if form != vllm_format.MEDUSA:
            return super().checkpoint(form, verifier)
        return vllm_format.medusa_checkpoint(self.network, verifier)

    def export_notices(self, form: str, family: Family) -> list[str]:
        return ["vLLM proposes the best token of each head, a chain, and no tree"]

    def graph_names(self) -> dict[str, str]:
        return {ROLE: ROLE}

    def entry(self, weights_dtype: str) -> dict[str, Any]:
        heads = self.network.config.heads
        return super().entry(weights_dtype) | {"heads": heads, "ranks": self.ranks, "tree": self.tree}

    def tensors(self, family: Family) -> dict[str, WeightRef]:
        """Two TensorRT plans cannot share a weight: the LM head of two graphs is handed to both."""
        shared = self.network.config.head == "shared"
        return {"lm_head_table": family.language.head} if shared else {}

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        from ...families.common.parts import GraphSpec
        from ...graphs.composer import Composer
        from ...graphs.traced_module import TraceInput, trace
        from ...graphs.weights import WeightRef

        config, language = self.network.config, family.language
        if config.vocab_size not in (None, language.head.shape[0]):
            raise ExportError(
                f"this draft was made for {config.vocab_size} tokens, the model has {language.head.shape[0]}"
            )
        tensors = self.stored_in(store, ROLE)
        with language.hooks():
            norm = language.final_norm
            blocks = trace(
                self.network.blocks(0).eval().requires_grad_(False),
                lambda m, hidden_states: (m(hidden_states),),
                [TraceInput("hidden", ("rows", config.hidden_size))],
                ("hidden_out",),
            )
        graph = Composer(ROLE, store, ROLE)
        hidden_states, by_head = norm.hidden_states(graph), []
        axis = graph.constant(np.array([1], np.int64))
        # ONNX Runtime has one kernel for integers and their product only where one product reads them.
        at_once = config.head == "shared" and store.integers_of(language.head) is not None
        for k in range(config.heads):
            prefix = f"{tensors.prefix}{k}."
            own = graph.call(blocks, f"head.{k}", {"hidden": hidden_states}, prefix.__add__)["hidden_out"]
            table = language.head
            if config.head != "shared":
                shape = (config.proposed or 0, config.hidden_size)
                table = WeightRef((f"{prefix}{config.layers}.weight",), False, shape)
            one = own if at_once else graph.product(own, table, f"head.{k}/logits")
            by_head.append(graph.node("Unsqueeze", [one, axis], f"head.{k}/one"))
        logits = by_head[0] if len(by_head) == 1 else graph.node("Concat", by_head, "heads", axis=1)
        if at_once:
            logits = graph.product(logits, language.head, "logits")
        d2t = None
        if config.trimmed is not None:
            d2t = graph.weight(WeightRef((f"{tensors.prefix}d2t",), False, (config.trimmed,), "int64"))
        for name, value in ranked(graph, logits, self.ranks, d2t).items():
            graph.output(name, value)
        return [GraphSpec(ROLE, ROLE, graph.model())]

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        from ...common.float64 import with_error

        for captured in captures:
            hidden = captured.residuals[max(captured.residuals)]
            index = np.arange(hidden.shape[0] * hidden.shape[1], dtype=np.int64)[::-3].copy()
            outputs = run({"hidden": hidden, "row_index": index})
            table = None if captured.lm_head is None else torch.from_numpy(captured.lm_head)
            hidden_states, differs = captured.final(index)
            likely = lambda net, *given: net(*given).log_softmax(-1)  # noqa: E731
            logits, off = with_error(self.network, likely, [hidden_states, table], [differs])
            config = self.network.config
            d2t = None if config.trimmed is None else self.network.d2t.numpy()
            words = config.vocab_size or logits.shape[-1]
            yield from compare_ranked(outputs, logits.numpy(), off.numpy(), d2t, words)


class MedusaKind(PublishedKind):
    """See the module."""

    name = MedusaDraft.kind
    title = "heads on the last row that look several tokens ahead"
    draft_length = 4
    draft = MedusaDraft
    forms = (vllm_format.MEDUSA,)

    def is_published(self, folder: Path) -> bool:
        return medusa_checkpoint.is_published(folder) or vllm_format.is_published(folder)

    def read_published(self, folder: Path) -> tuple[Any, Mapping[str, Any]]:
        notices: list[str] = []
        if vllm_format.is_published(folder):
            network, document = vllm_format.read_medusa(folder)
        else:
            network, document, notices = medusa_checkpoint.read_published(folder)
        return network, {
            "name": str(document.get("base_model_name_or_path", ""))[:200],
            "notices": notices,
        }
