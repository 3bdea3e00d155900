"""The speculative cycle: propose a tree, verify it in one pass, emit, make the accepted path valid.

State between cycles: every emitted token but the last is in the K/V of all layers; the last one is pending. Plain
decoding is the same loop with the empty tree. Corrected self-speculative cycle of FastVLM's algorithm 1:
advance by accepted + 1 always, d + 1 exit rows, crop all layers to the accepted path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..decode.passes import Decoder
from ..decode.tree import TokenTree
from .acceptance import Verdict, verify_draws, verify_forced
from .policy import DraftPolicy
from .proposer import Proposer, Request
from .sampling import Sampling, counter_uniform
from .stats import Stats


@dataclass
class Limits:
    """When to stop. `deadline` is a `time.perf_counter` value; `cancelled` is asked between cycles."""

    max_new_tokens: int
    eos_token_ids: Collection[int] = ()
    deadline: float | None = None
    cancelled: Callable[[], bool] = lambda: False


class Generation:
    """One request after its prefill. Iterate for tokens; then `finish_reason` and `stats` are final.

    The consumer may call `stop(reason)` after receiving a token: what is left of the cycle is discarded.
    """

    def __init__(
        self,
        decoder: Decoder,
        first_logits: np.ndarray,
        limits: Limits,
        stats: Stats,
        proposer: Proposer | None = None,
        policy: DraftPolicy | None = None,
        sampling: Sampling | None = None,
        prompt: Sequence[int] = (),
        force_acceptance: float | None = None,
    ):
        self.stats, self.tokens = stats, []
        self.finish_reason: str | None = None
        self._decoder, self._limits = decoder, limits
        self._proposer = None if policy is None else proposer
        self._policy = policy
        self._sampling = sampling or Sampling()
        self._first = first_logits
        self._forced = force_acceptance
        self.tokens: list[int]
        if self._proposer is not None and policy is not None:
            self._proposer.begin(Request(prompt, self._sampling, limits.eos_token_ids, policy))

    def stop(self, reason: str) -> None:
        """End after the token just received, whatever else ends there."""
        self.finish_reason = reason

    def __iter__(self) -> Iterator[int]:
        stats, arena = self.stats, self._decoder.arena
        base = arena.lengths[0]  # rows of the prompt; row base + i holds emitted token i
        try:
            yield from self._emit([self._sampling.choose(self._first, 0)])
            while self.finish_reason is None:
                if self._limits.cancelled():
                    self.finish_reason = "cancelled"
                    break
                if self._limits.deadline is not None and time.perf_counter() >= self._limits.deadline:
                    self.finish_reason = "deadline"
                    break
                assert arena.lengths[0] == base + len(self.tokens) - 1, "K/V and emitted tokens disagree"
                tokens = self._cycle()
                assert tokens, "a cycle emits at least one token"
                yield from self._emit(tokens)
        finally:
            # Reached early when the consumer closes the generator.
            self.finish_reason = self.finish_reason or "cancelled"
            stats.tokens = len(self.tokens)
            assert len(self.tokens) <= self._limits.max_new_tokens, "more tokens than the limit"
            stats.check()

    def _emit(self, tokens: list[int]) -> Iterator[int]:
        """Hand out the tokens of one cycle, one by one; discard what follows the end of the output."""
        left = len(tokens)
        try:
            for token in tokens:
                self.tokens.append(token)
                left -= 1
                if token in self._limits.eos_token_ids:
                    self.finish_reason = "eos"
                elif len(self.tokens) >= self._limits.max_new_tokens:
                    self.finish_reason = "length"
                yield token
                if self.finish_reason is not None:
                    return
        finally:
            self.stats.discarded += left

    def _cycle(self) -> list[int]:
        """One cycle: its tokens, accepted drafts first."""
        decoder, stats = self._decoder, self.stats
        begin = time.perf_counter()
        room = min(self._limits.max_new_tokens - len(self.tokens), decoder.max_width) - 1
        depth = 0 if self._policy is None else min(self._policy.draft_length(len(self.tokens)), room)
        decoder.begin_cycle(depth + 1)
        cut: int | None = None
        if self._proposer is not None and depth > 0:
            tree = self._proposer.propose(decoder, self.tokens, depth)
            assert tree.tokens[0] == self.tokens[-1] and tree.proposed <= depth, (
                "not a tree of the pending token"
            )
            cut = self._proposer.cut
        else:
            tree = TokenTree.chain(self.tokens[-1:])
        drafted = time.perf_counter()
        if cut is None:
            decoder.full(tree)
        else:
            decoder.tail(cut, len(tree))
        verified = time.perf_counter()
        verdict = self._judge(tree)
        decoder.accept(tree, verdict.path)
        stats.count(tree.proposed, len(verdict.path), verdict.evaluated)
        if self._policy is not None:
            self._policy.observe(tree.proposed, verdict)
        seconds, end = stats.seconds, time.perf_counter()
        seconds.draft += drafted - begin
        seconds.verify += verified - drafted
        seconds.head += end - verified
        return [*(tree.tokens[node] for node in verdict.path), verdict.token]

    def _judge(self, tree: TokenTree) -> Verdict:
        logits, index, choose = self._decoder.head(len(tree)), len(self.tokens), self._sampling.choose
        if self._forced is not None:
            uniforms = [
                counter_uniform(self._sampling.seed ^ 0x5EED, index + i) for i in range(tree.proposed)
            ]
            return verify_forced(
                tree, lambda node, depth: choose(logits[node], index + depth), uniforms, self._forced
            )
        return verify_draws(tree, lambda node, depth: choose(logits[node], index + depth))
