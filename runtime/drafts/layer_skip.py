"""Draft & Verify: the target drafts with some of its own sublayers left out (Zhang et al., arXiv 2309.08168).

What is drafted looks at the keys and values that verification left of everything accepted, and at its own of the tokens
since. Those it writes where verification will: slots beyond a sequence's length, which the pass over all segments then
writes anew in every layer, for they were computed from other hidden states than the target's. Layers whose attention is
left out are not written while drafting, and not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, ClassVar

from ..common.errors import BundleError, OptionError
from ..decoder.token_tree import TokenTree
from ..speculative.early_stop import ending
from ..speculative.proposer import Proposer
from ..speculative.sequence import FAILURES
from .layer_skip_options import kept_attention

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo
    from ..decoder.decoder import Decoder
    from ..decoder.forward_pass import ForwardPass
    from ..decoder.logits import TargetLogits
    from ..engines.base import Call, View
    from ..speculative.sequence import Sequence
    from ..speedup.budget import Budget


class LayerSkip(Proposer):
    """The draft kind `draft-and-verify`: chains, one pass of the graph `skipped` and the target's head for every token,
    for all sequences in step. It keeps nothing of a sequence.

    Raises `BundleError` for a draft without its graph, `OptionError` on an engine that has none (TensorRT plans).
    """

    drafts_on_device: ClassVar[bool] = True

    def __init__(self, draft: DraftInfo, decoder: Decoder):
        graph = draft.graphs.get("skipped")
        if graph is None:
            raise BundleError(f"manifest: draft {draft.name!r} has no graph; build the bundle again")
        if graph not in decoder.engine.graphs:
            raise OptionError(
                f"draft: {draft.name} needs the target's weights in a second graph, and TensorRT plans share none; choose "
                "another draft, or device cuda"
            )
        self.name = draft.name
        self.draft_graph = graph
        self._decoder, self._attention = decoder, kept_attention(decoder.manifest)
        self._heads: dict[int, TargetLogits] = {}

    def propose(self, sequences: Items[Sequence], budgets: Items[Budget]) -> list[TokenTree]:
        """Chains of the likeliest tokens, or of drawn ones (`Sequence.propose`). Places of sequences that are not asked
        pass along with a token of another one: what that writes is scratch of their own."""
        decoder = self._decoder
        run, head = self.pass_apart(), self._head()
        tokens = [sequences[0].tokens[-1]] * decoder.batch
        chains = {sequence: sequence.tokens[-1:] for sequence in sequences}
        most = {sequence: budget.depth for sequence, budget in zip(sequences, budgets, strict=True)}
        ends = {sequence: ending(sequence) for sequence in sequences}
        drafting, step = list(sequences), 0
        while drafting:
            for sequence in sequences:
                tokens[sequence.batch_index] = chains[sequence][-1]
            decoder.run_partial(run, tokens, step)
            logits = head.run()
            step += 1
            for sequence in list(drafting):
                chain = chains[sequence]
                try:
                    token = sequence.propose(logits, sequence.batch_index, chain[1:])
                except FAILURES as error:
                    sequence.end_draft(error)
                    drafting.remove(sequence)
                    continue
                chain.append(token)
                if len(chain) > most[sequence] or ends[sequence](logits, sequence.batch_index, token):
                    drafting.remove(sequence)
        return [sequence.drafted(chains[sequence]) for sequence in sequences]

    def pass_apart(self) -> ForwardPass:
        return self._decoder.bind_partial(self.draft_graph, self._attention)

    def draft_step(
        self, hidden: View, outputs: dict[str, View], number: int, sent: Mapping[str, View]
    ) -> list[Call]:
        inputs = {"hidden": hidden, "row_index": self._decoder.heads.row_range(1)}
        return [self._decoder.engine.bind("head", inputs, outputs)]

    def _head(self) -> TargetLogits:
        """The target's head over the draft's hidden state of every sequence."""
        decoder, batch = self._decoder, self._decoder.batch
        head = self._heads.get(batch)
        if head is None:
            hidden_states, index = self.pass_apart().result, decoder.heads.row_range(batch)
            head = self._heads[batch] = decoder.heads.bind(
                hidden_states, index, batch, "draft.", self.draft_graph
            )
        return head
