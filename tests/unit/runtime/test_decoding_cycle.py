"""The cycle on a toy model: any proposer, any tree, any stop gives the tokens of plain decoding.

The toy is in `toy.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.policy.logistic import LogisticLength
from vlmexport.runtime.sampling.sampler import Sampling
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speculative.cycle import Cycle
from vlmexport.runtime.speculative.proposer import Proposer
from vlmexport.runtime.speculative.sequence import Sequence as Request
from vlmexport.runtime.speculative.sequence import SequenceLimits
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.stats import Stats

from tests.support.toy import PROMPT, VOCABULARY, ToyDecoder, ToyRows, decode, logits_of, started

EOS = 7


class OracleTree(Proposer):
    """A proposer without a trunk: trees around the true continuation, wrong where the random stream says."""

    name = "oracle-tree"

    def __init__(self, seed: int, quality: float, branches: bool = True):
        self._rng, self._quality, self._branches = np.random.default_rng(seed), quality, branches

    def _draft(self, sequence: Request, prefix: Sequence[int]) -> int:
        token = sequence.sampling.choose(logits_of(prefix), len(prefix) - len(PROMPT))
        return token if self._rng.random() <= self._quality else (token + 1) % VOCABULARY

    def propose_one(self, sequence: Request, budget: Budget) -> TokenTree:
        emitted = sequence.tokens
        tokens, parents, node, prefix = [emitted[-1]], [-1], 0, [*PROMPT, *emitted]
        while len(tokens) <= budget.nodes and self._rng.random() < 0.95:
            token = self._draft(sequence, prefix)
            if self._branches and len(tokens) < budget.nodes and self._rng.random() < 0.5:
                tokens.append((token + 2) % VOCABULARY)
                parents.append(node)
            tokens.append(token)
            parents.append(node)
            node = len(tokens) - 1
            prefix.append(token)
        return TokenTree(tokens, parents)


class OracleTrunk(OracleTree):
    """The same as a self-draft: every node passes the trunk, the tail verifies."""

    name = "oracle-trunk"

    @property
    def cut(self) -> int:
        return 1

    def step_logits(self, step: int) -> None:
        """Draft logits, which `choose` does without."""

    def choose(self, sequence: Request, rows: None, row: int, after: list[int]) -> int:
        return self._draft(sequence, [*PROMPT, *sequence.tokens, *after])


def run(limit: int = 40, eos: tuple[int, ...] = (), **options) -> tuple[Request, ToyDecoder, list[int]]:
    decoder = ToyDecoder()
    request = started(options.pop("limits", None) or SequenceLimits(limit, eos), **options)
    return request, decoder, list(decode(Cycle(decoder), decoder, request))  # type: ignore[arg-type]


samplings = st.builds(
    Sampling, st.sampled_from([0.0, 0.7, 1.3]), st.sampled_from([0, 4]), st.just(0.9), st.integers(0, 99)
)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([OracleTree, OracleTrunk]), st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.integers(0, 12), st.integers(1, 40), st.booleans(), samplings,
)  # fmt: skip
def test_output_does_not_depend_on_the_proposer(kind, seed, quality, depth, limit, ends, sampling) -> None:
    eos = (EOS,) if ends else ()
    plain, _, expected = run(limit, eos, sampling=sampling)
    proposer = kind(seed, quality, branches=kind is OracleTree)
    generation, decoder, tokens = run(
        limit, eos, sampling=sampling, proposer=proposer, policy=FixedLength(depth)
    )
    assert tokens == expected == generation.tokens
    assert generation.finish_reason == plain.finish_reason
    assert plain.stats.tau == 1
    stats = generation.stats
    stats.check()
    assert stats.tokens == len(tokens)
    valid = len(PROMPT) + len(tokens) - 1
    assert decoder.caches[0][:valid] == [*PROMPT, *tokens][:valid]
    if quality == 1.0 and kind is OracleTrunk:
        assert stats.alpha in (1.0, None)
        assert stats.accepted == stats.proposed
    if kind is OracleTrunk and depth:
        assert sum(n for name, n in decoder.passes if name == "trunk") == stats.proposed + sum(
            name == "tail" for name, _ in decoder.passes
        ), "d + 1 trunk passes a cycle, and the verifier runs none"


def test_end_token_limit_and_discarded_counts() -> None:
    _, _, endless = run(60)
    at = next(i for i, token in enumerate(endless) if i > 3 and endless.index(token) == i)
    generation, _, tokens = run(60, (endless[at],), proposer=OracleTree(0, 1.0, False), policy=FixedLength(8))
    assert tokens == endless[: at + 1]
    assert generation.finish_reason == "eos"
    generation, _, tokens = run(at + 1, (endless[at],))
    assert (generation.finish_reason, len(tokens)) == ("eos", at + 1), "the end token as the last one allowed"
    for limit in (1, 2, 3):
        generation, decoder, tokens = run(limit, proposer=OracleTree(0, 1.0, False), policy=FixedLength(8))
        assert tokens == endless[:limit]
        assert generation.finish_reason == "length"
        assert generation.stats.discarded == 0, "drafting stops where the limit is"
        assert max((n for _, n in decoder.passes), default=0) <= max(limit - 1, 0)


def test_consumer_stops_in_the_middle_of_a_cycle() -> None:
    _, _, endless = run(60)
    decoder = ToyDecoder()
    request = started(SequenceLimits(60), OracleTree(0, 1.0, False), FixedLength(8))
    received = []
    for token in decode(Cycle(decoder), decoder, request):  # type: ignore[arg-type]
        received.append(token)
        if len(received) == 5:
            request.stop("stop")
    assert received == endless[:5]
    assert (request.finish_reason, request.stats.tokens) == ("stop", 5)
    assert request.stats.discarded > 0
    request.stats.check()


def test_closing_deadline_and_cancel_leave_true_counters() -> None:
    decoder = ToyDecoder()
    request = started(SequenceLimits(60))
    tokens = decode(Cycle(decoder), decoder, request)  # type: ignore[arg-type]
    next(tokens)
    next(tokens)
    tokens.close()
    assert (request.finish_reason, request.stats.tokens) == ("cancelled", 2)
    late, _, tokens_ = run(limits=SequenceLimits(60, deadline=time.perf_counter() - 1))
    assert (late.finish_reason, len(tokens_)) == ("deadline", 1)
    answers = iter([False, False, True])
    cancelled, _, tokens_ = run(limits=SequenceLimits(60, cancelled=lambda: next(answers)))
    assert (cancelled.finish_reason, len(tokens_)) == ("cancelled", 3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, OracleTree, OracleTrunk]), st.integers(0, 6), st.integers(1, 25),
    st.sampled_from([0.0, 0.6, 1.0])), min_size=1, max_size=7), st.integers(1, 4))  # fmt: skip
def test_a_batch_gives_each_request_what_it_gets_alone(asked, together: int) -> None:
    """Any mixture of proposers, lengths and limits; who ends makes room for who waits."""
    decoder = ToyDecoder()
    cycle, waiting, done = Cycle(decoder), list(enumerate(asked)), {}  # type: ignore[arg-type]
    numbers: dict[Request, int] = {}
    while waiting or cycle.sequences:
        while waiting and len(cycle.sequences) < together:
            number, (kind, depth, limit, quality) = waiting.pop(0)
            proposer = None if kind is None else kind(number, quality, branches=kind is OracleTree)
            request = started(SequenceLimits(limit), proposer, FixedLength(depth) if kind else None)
            decoder.add()
            cycle.join(request)
            numbers[request] = number
            list(request.emit([request.choose(ToyRows([logits_of(PROMPT)]), 0, [])]))
        for request in [r for r in cycle.sequences if r.finish_reason is not None]:
            cycle.leave(request)
            request.finish()
            done[numbers[request]] = request.tokens
        if cycle.sequences:
            for request, tokens in zip(list(cycle.sequences), cycle.run(), strict=True):
                list(request.emit(tokens))
    _, _, endless = run(40)
    assert [done[number] for number in range(len(asked))] == [endless[:limit] for _, _, limit, _ in asked]


def test_forced_acceptance_reaches_the_rate() -> None:
    proposer = OracleTree(0, 0.0, False)
    generation, _, _ = run(2000, proposer=proposer, policy=FixedLength(5), force_acceptance=0.8)
    assert generation.stats.alpha == pytest.approx(0.8, abs=0.04)


def test_policy_is_called_before_and_after_each_cycle() -> None:
    asked: list[int] = []
    told: list[tuple[int, Verdict]] = []

    class Policy(FixedLength):
        def allot(self, sequences: Sequence[Request]) -> list[Budget]:
            asked.append(len(sequences[0].tokens))
            return super().allot(sequences)

        def observe(self, sequence: Request, proposed: int, verdict: Verdict) -> None:
            told.append((proposed, verdict))

    generation, _, _ = run(40, proposer=OracleTree(0, 0.7, False), policy=Policy(3))
    emitted = 1
    for before, (_, verdict) in zip(asked, told, strict=True):
        assert before == emitted
        emitted += len(verdict.path) + 1
    assert (len(told), sum(n for n, _ in told)) == (generation.stats.cycles, generation.stats.proposed)


def test_policies() -> None:
    logistic = LogisticLength(5, 15, midpoint=32, slope=0.01)
    assert [logistic.draft_length(t) for t in (0, 31, 32, 64)] == [9, 9, 10, 10]
    assert LogisticLength(5, 15, midpoint=1024).draft_length(0) == 5
    assert LogisticLength(5, 15, midpoint=0, slope=10).draft_length(500) in (14, 15)
    assert FixedLength(3).keep_drafting(0.0)
    assert FixedLength(3, 0.5).keep_drafting(0.5) and not FixedLength(3, 0.5).keep_drafting(0.4)
    for wrong in (lambda: FixedLength(-1), lambda: FixedLength(3, 2.0), lambda: LogisticLength(5, 4)):
        with pytest.raises(OptionError):
            wrong()


def test_speed_is_of_the_tokens_after_the_first() -> None:
    assert Stats(tokens=5, time_to_first_token=1.0, total_seconds=3.0).tokens_per_second == 2.0
    assert Stats(tokens=1, time_to_first_token=1.0, total_seconds=3.0).tokens_per_second is None


def test_stats_refuse_broken_identities() -> None:
    with pytest.raises(AssertionError, match="token identity"):
        Stats(tokens=5, cycles=2, accepted=1).check()
