"""What a proposer is: it hands over a token tree whose root is the pending token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..decode.tree import TokenTree

if TYPE_CHECKING:
    from ..decode.passes import Decoder
    from .policy import DraftPolicy
    from .sampling import Sampling


@dataclass(frozen=True)
class Request:
    """What does not change during a request and a proposer may use."""

    prompt: Sequence[int]
    sampling: Sampling
    eos_token_ids: Collection[int]
    policy: DraftPolicy


class Proposer(Protocol):
    """One draft kind. Proposals are a deterministic function of the request and the tokens emitted so far, so that
    draw-and-match verification is lossless at any temperature."""

    name: str
    cut: int | None
    """Segments that `propose` has already run for every node (self-speculation: the tail verifies), or None:
    the verifier runs all segments."""

    def begin(self, request: Request) -> None:
        """A new request starts; its prompt is in the cache."""
        ...

    def propose(self, decoder: Decoder, emitted: Sequence[int], limit: int) -> TokenTree:
        """A tree of depth at most `limit` (≥ 1) and at most `limit` drafted nodes, rooted at `emitted[-1]`.

        With `cut` set, the exit rows of all nodes are in the decoder when this returns.
        """
        ...
