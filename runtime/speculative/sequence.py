"""One request's state while it is decoded: its tokens, how they are chosen, and when they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..common.errors import GrammarError, NumericsError
from ..decoder.logits import ArgmaxResult, TargetLogits
from ..decoder.token_tree import TokenTree
from ..sampling.draft_sampling import DraftSampling
from ..sampling.sampler import ACCEPTING, DRAWING_AGAIN, FORCING, PROPOSING, Sampling, draw
from ..sampling.typical import Typical, verify_typical
from ..sampling.verify import Verdict, verify_draws, verify_forced, verify_sampled
from ..speedup.stats import Stats

if TYPE_CHECKING:
    from ..decoder.device.logits_processors import LogitsChanges
    from ..drafts.memory.answers import Memory
    from ..grammars.matcher import GrammarMatcher
    from ..policy.base import DraftPolicy
    from ..sampling.logits_processors import Processors
    from ..sampling.logprobs import Logprobs
    from .proposer import Proposer


FAILURES = (NumericsError, GrammarError)
"""What ends one sequence, and none of those that are decoded with it."""


@dataclass
class SequenceLimits:
    """When a request ends. `deadline` is a `time.perf_counter` value; `cancelled` is asked between cycles."""

    max_new_tokens: int
    eos_token_ids: Collection[int] = ()
    deadline: float | None = None
    cancelled: Callable[[], bool] = lambda: False


@dataclass(eq=False)
class Sequence:
    """A request in a batch. `batch_index` is its place there; the cycle moves it when others leave.

    `prompt_ids` holds the ids that the decoder was prefilled with, image placeholders included (`barred` ids are never
    proposed).
    """

    prompt_ids: list[int]
    limits: SequenceLimits
    stats: Stats
    sampling: Sampling = field(default_factory=Sampling)
    proposer: Proposer | None = None
    policy: DraftPolicy | None = None
    processors: Processors | None = None
    force_acceptance: float | None = None
    typical: Typical | None = None
    """Accept what is typical: lossy. At temperature 0 that is greedy decoding, as for Medusa's authors."""
    drawing: DraftSampling | None = None
    """Whether proposals are drawn from the draft's distribution; None: they are matched with the target's draws."""
    q: list[np.ndarray] = field(default_factory=list)
    """What the chain that is drafted on the trunk right now was drawn from."""
    barred: frozenset[int] = frozenset()
    memory: Memory | None = None
    """Earlier answers, for a draft that proposes how they went on."""
    grammar: GrammarMatcher | None = None
    """What the answer must be; `processors` mask by it."""
    logprobs: Logprobs | None = None
    """Where the log-probabilities of its tokens are noted."""
    batch_index: int = 0
    prompt_positions: np.ndarray | None = None
    """int64 [axes, n] of the prompt's tokens; None: they count from 0."""
    tokens: list[int] = field(default_factory=list)
    """Emitted so far; the last one is pending: not in the cache yet."""
    finish_reason: str | None = None
    error: NumericsError | GrammarError | None = None
    """Why it ended without a result: a graph gave numbers of its own that are not finite, or the grammar led nowhere."""

    @property
    def takes_the_best(self) -> bool:
        """Whether tokens, drafted and emitted ones, are the likeliest of the logits or of those that `changes` makes of
        them: nothing else of any logits matters."""
        return (
            (self.processors is None or self.changes is not None)
            and self.sampling.temperature == 0
            and self.drawing is None
            and self.logprobs is None
        )

    @property
    def changes(self) -> LogitsChanges | None:
        """What the request changes of logits, as far as a device can do all of it."""
        return None if self.processors is None else self.processors.on_device

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.limits.max_new_tokens - len(self.tokens)

    def stop(self, reason: str) -> None:
        """End after the token just emitted, whatever else ends there."""
        self.finish_reason = reason

    def fail(self, error: NumericsError | GrammarError) -> None:
        """End without a result; the others of the batch go on."""
        self.error, self.finish_reason = error, "error"

    def end_draft(self, error: NumericsError | GrammarError) -> None:
        """Drafting came to no token. Numbers that are not finite end the request; where the grammar gives up, the target may
        never go."""
        if isinstance(error, NumericsError):
            self.fail(error)

    def interrupted(self) -> bool:
        """Ask between cycles: cancelled, or past the deadline; sets `finish_reason`."""
        limits = self.limits
        if limits.cancelled():
            self.finish_reason = "cancelled"
        elif limits.deadline is not None and time.perf_counter() >= limits.deadline:
            self.finish_reason = "deadline"
        return self.finish_reason is not None

    def emit(self, tokens: list[int]) -> Iterator[int]:
        """Hand out the tokens of one cycle, one by one; what follows the end of the output is discarded.

        The consumer may `stop` after receiving a token.
        """
        left, emitted, limits = len(tokens), self.tokens, self.limits
        try:
            for token in tokens:
                emitted.append(token)
                if self.processors is not None:
                    self.processors.extend((token,))
                left -= 1
                if token in limits.eos_token_ids:
                    self.finish_reason = "eos"
                elif len(emitted) >= limits.max_new_tokens:
                    self.finish_reason = "length"
                yield token
                if self.finish_reason is not None:
                    return
        finally:
            self.stats.discarded += left
            if self.logprobs is not None:
                self.logprobs.cut(len(emitted))

    def finish(self, whole: bool = True) -> None:
        """The last words: counters are final. Their identities are checked where the last cycle is `whole`: an exception
        may have ended it at any point."""
        self.finish_reason = self.finish_reason or "cancelled"
        self.stats.tokens = len(self.tokens)
        assert len(self.tokens) <= self.limits.max_new_tokens, "more tokens than the limit"
        if whole:
            self.stats.check()

    def choose(self, logits: TargetLogits, logits_index: int, after: list[int]) -> int:
        """The token that follows the emitted tokens and `after`, from the logits at `logits_index`.

        Raises `NumericsError` for logits that are not finite, `GrammarError` where no token may follow.
        """
        if self.processors is None and self.sampling.temperature == 0:
            return logits.best(logits_index)
        return self.sampling.choose(self._logits(logits, logits_index, after), len(self.tokens) + len(after))

    def choose_first(self, logits: TargetLogits) -> int:
        """The first token, from the logits behind the prompt. Raises as `choose`."""
        token = self.choose(logits, 0, [])
        if self.logprobs is not None:
            self.logprobs.add(token, logits.logits(0))
        return token

    def propose(self, logits: TargetLogits, logits_index: int, after: list[int]) -> int:
        """The token to draft after the emitted tokens and `after`, from draft logits. Matched, it is drawn with the
        uniform that the target will use there: it agrees as often as that makes the two distributions agree. Else it
        is drawn with a uniform of its own, and `q` remembers from what."""
        if self.drawing is None:
            return self.choose(logits, logits_index, after)
        self.q.append(self.distribution(logits, logits_index, after))
        return draw(self.q[-1], self.proposing(len(after)))

    def proposing(self, depth: int) -> float:
        """The uniform that draws the proposal behind `depth` others. Every cycle has its own: how much is drafted may
        depend on what was drafted before and thrown away, and must not depend on what is drawn next."""
        return self.sampling.uniform(len(self.tokens) + depth, PROPOSING + (self.stats.cycles << 16))

    def drafted(self, tokens: Items[int]) -> TokenTree:
        """The chain of the pending token and what `propose` drafted after it."""
        tree = TokenTree.chain(tokens)
        if self.q:
            tree.draft_probs, self.q = self.q, []
        return tree

    def judge(self, tree: TokenTree, logits: TargetLogits | ArgmaxResult, first: int) -> Verdict:
        """Verify a tree whose node i has its logits at first + i."""
        verdict = self._judged(tree, logits, first)
        if self.logprobs is not None:
            assert isinstance(logits, TargetLogits), "a device that keeps the logits to itself"
            tokens = [*(tree.tokens[node] for node in verdict.path), verdict.token]
            for at, (node, token) in enumerate(zip((0, *verdict.path), tokens, strict=True)):
                self.logprobs.add(token, logits.logits(first + node), drafted=at < len(verdict.path))
        return verdict

    def _judged(self, tree: TokenTree, logits: TargetLogits | ArgmaxResult, first: int) -> Verdict:
        if isinstance(logits, ArgmaxResult):
            return self._accept(tree, lambda node, depth: logits.best(first + node))
        greedy = self.processors is None and self.sampling.temperature == 0
        if greedy and self.force_acceptance is None and tree.draft_probs is None:  # the way of most requests
            return verify_draws(tree, lambda node, depth: logits.best(first + node))
        walked: list[int] = []

        def choose(node: int, depth: int) -> int:
            token = self.choose(logits, first + node, walked)
            walked.append(token)
            return token

        if self.force_acceptance is not None:
            return self._accept(tree, choose)
        if self.typical is not None and not self.sampling.greedy:
            return verify_typical(
                tree,
                lambda node, after: self.distribution(logits, first + node, after),
                lambda node, after: self.choose(logits, first + node, list(after)),
                self.typical,
            )
        if tree.draft_probs is not None:
            return self._drawn(tree, tree.draft_probs, logits, first)
        if tree.unused_draft_probs is not None:
            return self._matched(tree, tree.unused_draft_probs, logits, first)
        return verify_draws(tree, choose)

    def _accept(self, tree: TokenTree, choose: Callable[[int, int], int]) -> Verdict:
        """What the target chooses, or as much of it as `force_acceptance` says."""
        if self.force_acceptance is None:
            return verify_draws(tree, choose)
        index = len(self.tokens)
        uniforms = [self.sampling.uniform(index + i, FORCING) for i in range(tree.proposed)]
        return verify_forced(tree, choose, uniforms, self.force_acceptance)

    def _drawn(self, tree: TokenTree, q: Items[np.ndarray], logits: TargetLogits, first: int) -> Verdict:
        """Acceptance and residual of a chain that was drawn from `q`."""
        return verify_sampled(
            tree, lambda node: self._compared(tree, q, logits, first, node), q, self._uniforms(tree)
        )

    def _matched(self, tree: TokenTree, q: Items[np.ndarray], logits: TargetLogits, first: int) -> Verdict:
        """Draw-and-match of a chain that could have been drawn from `q`."""

        def choose(node: int, depth: int) -> int:
            p = self._compared(tree, q, logits, first, node)
            return draw(p, self.sampling.uniform(len(self.tokens) + depth))

        return verify_draws(tree, choose)

    def _compared(
        self, tree: TokenTree, q: Items[np.ndarray], logits: TargetLogits, first: int, node: int
    ) -> np.ndarray:
        """p after a node of a chain, noted beside the `q` of the same token."""
        p = self.distribution(logits, first + node, tree.tokens[1 : node + 1])
        if self.drawing is not None and node < len(q):
            self.drawing.compare(p, q[node])
        return p

    def distribution(self, logits: TargetLogits, logits_index: int, after: Items[int]) -> np.ndarray:
        """p of the token after the emitted ones and `after`: float64 [V], from the logits at `logits_index`.

        Raises `NumericsError` for logits that are not finite, `GrammarError` where no token may follow.
        """
        return self.sampling.probabilities(self._logits(logits, logits_index, after))

    def _logits(self, target_logits: TargetLogits, logits_index: int, after: Items[int]) -> np.ndarray:
        """Logits [V] behind the emitted tokens and `after`, as the processors leave them."""
        target_logits.check(logits_index)
        logits = target_logits.logits(logits_index)
        return logits if self.processors is None else self.processors.apply(logits, after)

    def _uniforms(self, tree: TokenTree) -> list[tuple[float, float]]:
        """One uniform for accepting and one for drawing again, per output position."""
        index, uniform = len(self.tokens), self.sampling.uniform
        return [(uniform(index + i, ACCEPTING), uniform(index + i, DRAWING_AGAIN)) for i in range(len(tree))]
