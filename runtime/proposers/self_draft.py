"""Self-speculation: the trunk of the target drafts, through an imitation network or straight into the head.

The K/V that drafting writes and the exit rows it saves are the ones verification uses (LayerSkip,
arXiv 2404.16710; imitation network: FastVLM, arXiv 2510.22641, with its loop corrected).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..decode.tree import TokenTree
from ..speculate.proposer import Request

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo
    from ..decode.passes import Decoder


class SelfDraft:
    """Drafts `early-exit` and `imitation`. `pick(logits) -> id` replaces the choice of tokens (tests)."""

    def __init__(
        self, draft: DraftInfo, cuts: Sequence[int], pick: Callable[[np.ndarray], int] | None = None
    ):
        self.name = draft.name
        assert draft.layer is not None
        self.cut: int | None = list(cuts).index(draft.layer)
        self._graph = draft.graphs.get("imitation")
        self._pick = pick

    def begin(self, request: Request) -> None:
        self._request = request

    def propose(self, decoder: Decoder, emitted: Sequence[int], limit: int) -> TokenTree:
        request, graph, cut = self._request, self._graph, self.cut
        sampling, policy, eos = request.sampling, request.policy, request.eos_token_ids
        assert cut is not None
        token, index = emitted[-1], len(emitted)
        tokens = [token]
        for row in range(limit):
            decoder.trunk(cut, token)
            logits = decoder.draft_logits(graph, row)
            # At a temperature the draft is drawn with the uniform that the target will use at this index:
            # deterministic given the request, and it matches as often as the two distributions agree.
            token = self._pick(logits) if self._pick else sampling.choose(logits, index + row)
            tokens.append(token)
            if token in eos or (
                policy.needs_confidence and not policy.keep_drafting(_confidence(logits, token))
            ):
                break
        decoder.trunk(cut, token)  # the last draft passes the trunk too: d + 1 exit rows
        return TokenTree.chain(tokens)


def _confidence(logits: np.ndarray, token: int) -> float:
    """Probability of `token` under a softmax of logits [V], in float32."""
    return float(1.0 / np.exp(logits - logits[token]).sum())
