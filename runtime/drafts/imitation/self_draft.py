"""Self-speculation: the trunk of the target drafts, through an imitation network or straight into the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ...bundle.manifest import DraftInfo
from ...common.errors import BundleError
from ...decoder.decoder import Decoder
from ...decoder.logits import TargetLogits
from ...engines.base import DTYPES, Call, View
from ...engines.buffers import HostBuffer
from ...speculative.proposer import Proposer
from ...speculative.sequence import Sequence


class SelfDraft(Proposer):
    """Drafts `early-exit` and `imitation`: what the exit states say after the graph `imitation`, if there is one, and
    the target's own norm and head. Raises `BundleError` for a draft without a layer."""

    drafts_on_device: ClassVar[bool] = True

    def __init__(self, draft: DraftInfo, decoder: Decoder):
        if draft.layer is None:
            raise BundleError(f"manifest: draft {draft.name!r} has no layer; build the bundle again")
        self.name = draft.name
        self._cut = decoder.manifest.decoder.cuts.index(draft.layer)
        self._decoder, self._graph = decoder, draft.graphs.get("imitation")
        self.draft_graph = self._graph or "head"
        engine, batch = decoder.engine, decoder.arena.max_batch
        self._size = decoder.manifest.decoder.hidden_size
        self._index = HostBuffer(engine, f"{draft.name}.row_index", batch, "int64")
        self._index.host((batch,))[:] = range(batch)
        self._index.push((batch,))
        item = DTYPES[decoder.dtype].itemsize
        self._out = None
        if self._graph is not None:
            self._out = engine.allocate(f"{draft.name}.hidden_states", batch * self._size * item)
        self._steps: dict[tuple[int, int], tuple[Call | None, TargetLogits]] = {}
        self._arena = decoder.arena

    @property
    def cut(self) -> int:
        return self._cut

    def step_logits(self, step: int) -> TargetLogits:
        """Draft logits after the exit states of `step`; entry b is of sequence b."""
        arena = self._arena
        call, head = self._steps.get((arena.batch, step)) or self._bind(arena.batch, step)
        if call is not None:
            call.run()
        return head.run()

    def choose(self, sequence: Sequence, logits: TargetLogits, logits_index: int, after: list[int]) -> int:
        """The token of the draft logits; at a temperature drawn, with the target's uniform or from q
        (`Sequence.propose`)."""
        return sequence.propose(logits, logits_index, after)

    def draft_step(
        self, hidden: View, outputs: dict[str, View], number: int, sent: Mapping[str, View]
    ) -> list[Call]:
        call, hidden = self._corrected_in_cycle(hidden, number, sent)
        inputs = {"hidden": hidden, "row_index": self._index.view((1,))}
        head = self._decoder.engine.bind("head", inputs, outputs)
        return [head] if call is None else [call, head]

    def _bind(self, batch: int, step: int) -> tuple[Call | None, TargetLogits]:
        decoder = self._decoder
        call, hidden = self._corrected(decoder.exit_hidden(self._cut, step), batch)
        head = decoder.heads.bind(hidden, self._index.view((batch,)), batch, "draft.", self.draft_graph)
        result = self._steps[batch, step] = (call, head)
        return result

    def _corrected_in_cycle(
        self, hidden: View, number: int, sent: Mapping[str, View]
    ) -> tuple[Call | None, View]:
        """As `_corrected`, of the exit state of that `number` in a cycle that a device does by itself."""
        return self._corrected(hidden, 1)

    def _corrected(self, hidden: View, batch: int) -> tuple[Call | None, View]:
        """The call of the imitation network over exit states [batch, 1, E], None without one, and the hidden states
        that the head then reads."""
        if self._graph is None or self._out is None:
            return None, hidden
        out = self._out.view((batch, 1, self._size), self._decoder.dtype)
        return self._decoder.engine.bind(self._graph, {"hidden": hidden}, {"hidden_out": out}), out
