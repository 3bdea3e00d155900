"""What an imitation network with attention says in the runtime, against the network in PyTorch over transformers' own rows."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from vlmexport.runtime import drafts as proposers
from vlmexport.runtime.decoder.logits import TargetLogits
from vlmexport.runtime.drafts.adversarial import AdversarialProposer
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speculative.cycle import Cycle
from vlmexport.runtime.speculative.sequence import Sequence, SequenceLimits
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.stats import Stats

from tests.support.lossless import Bushy
from tests.support.oracle import Request
from tests.support.remembering import wrong_token
from tests.support.rig import Rig, close

NAME, GRAPH, LAYER = "imitation@2", "imitation.2", 2
"""The draft with attention in bundles of two cuts."""


class Watched(AdversarialProposer):
    """The draft with attention, whose logits are compared wherever it is asked; it drafts what is right, and every fifth
    token of an output what is wrong."""

    def __init__(self, rig: Rig) -> None:
        draft = rig.manifest.draft(NAME)
        assert draft is not None and draft.options.own_cache is not None
        super().__init__(proposers.create(draft, rig.decoder), rig.manifest.text.vocab_size)
        self.name, self.compared, self._rig = "watched", 0, rig
        self._network: Any = rig.tiny.networks()[GRAPH]
        self.requests: dict[Sequence, Request] = {}

    def choose(self, sequence: Sequence, rows: TargetLogits, row: int, after: list[int]) -> int:
        request, tokens = self.requests[sequence], (*sequence.tokens, *after)
        want = says(self._rig, self._network, request, tokens)
        close(
            rows.logits(row)[None],
            want,
            f"draft of sequence {sequence.batch_index} behind {len(tokens)} tokens",
        )
        self.compared += 1
        token = self._rig.oracle.greedy(request, 60)[len(tokens)]
        return wrong_token(token) if len(tokens) % 5 == 3 else token


def says(rig: Rig, network: Any, request: Request, tokens: Items[int]) -> Any:
    """Logits [1, V] of the draft behind `tokens`, by one pass over all exit rows of the text."""
    with torch.inference_mode():
        return rig.oracle.judge(network(rig.oracle.rows_after(request, tokens, LAYER)[None])[0, -1:])


class Uneven:
    """Allots to each sequence what its turn says; nothing where there is no more."""

    needs_confidence = False

    def __init__(self, lengths: Items[int]) -> None:
        self._lengths = iter(lengths)

    def allot(self, sequences: Items[Sequence]) -> list[Budget]:
        assert len(sequences) == 1
        length = next(self._lengths, 0)
        return [Budget.chain(length) if length else Budget(0, 0)]

    def keep_drafting(self, confidence: float) -> bool:
        return True

    def observe(self, sequence: Sequence, proposed: int, verdict: Verdict) -> None:
        """Turns do not depend on it."""


class Members:
    """Sequences that are decoded together, and come and go."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.cycle, self.watched = rig, Cycle(rig.decoder), Watched(rig)
        self.sequences: dict[Request, Sequence] = {}
        rig.decoder.reset(0)

    def join(self, request: Request, lengths: Items[int], proposer: Any = None) -> None:
        """Prefill a request, which drafts as much as `lengths` say, with the watched draft or another one."""
        rig, proposer = self.rig, proposer or self.watched
        sequence = Sequence(
            rig.first_ids(request), SequenceLimits(60), Stats(), proposer=proposer, policy=Uneven(lengths)
        )
        self.watched.requests[sequence] = request
        rows = rig.join(request, sequence)
        proposer.begin(sequence)
        self.cycle.join(sequence)
        list(sequence.emit([sequence.choose(rows, 0, [])]))
        self.sequences[request] = sequence

    def leave(self, request: Request) -> None:
        """Let it go; the last one takes its place."""
        sequence = self.sequences.pop(request)
        self.cycle.leave(sequence)
        sequence.proposer.end(sequence)  # type: ignore[union-attr]

    def run(self, cycles: int) -> None:
        """So many cycles; what comes out is the target's."""
        for _ in range(cycles):
            for sequence, tokens in zip(list(self.cycle.sequences), self.cycle.run(), strict=True):
                list(sequence.emit(tokens))
        for request, sequence in self.sequences.items():
            count = len(sequence.tokens)
            assert tuple(sequence.tokens) == self.rig.oracle.greedy(request, 60)[:count]


def alone(rig: Rig) -> None:
    """One sequence: full and partial acceptance, cycles without a draft, a cache that grows; then another request."""
    members = Members(rig)
    for seed, length in ((81, 9), (82, 3)):
        request = rig.request(seed, length)
        members.join(request, (3, 1, 0, 4, 2, 0, 0, 5, 1, 6, 2, 6, 5, 6))
        members.run(14)
        members.leave(request)
    assert members.watched.compared > 40


def together(rig: Rig) -> None:
    """A batch: uneven lengths, others that draft before this draft's cut and at it, trees of others, cycles in which it drafts
    nothing, and places that change hands."""
    members = Members(rig)
    before, with_it = (
        proposers.create(next(d for d in rig.manifest.drafts if d.name == name), rig.decoder)
        for name in ("early-exit@1", f"early-exit@{LAYER}")
    )
    requests = [rig.request(83 + number, 4 + 5 * number % 11) for number in range(6)]
    truth = rig.oracle.greedy(requests[2], 60)
    bushy = Bushy(rig, None, lambda index: truth[index] if index % 3 else wrong_token(truth[index]))
    members.join(requests[0], (3, 0, 2, 0, 5, 1, 0, 0, 4, 3, 2, 0, 3))
    members.join(requests[1], (1, 0, 4, 0, 0, 2, 0, 3, 1, 2, 0, 2, 4))
    members.run(3)
    members.join(requests[2], (3, 4, 0, 3, 4, 2, 3, 3, 0, 2), bushy)
    members.join(requests[3], (2, 2, 3, 1, 1, 2, 0, 3, 2), with_it)
    members.run(4)
    members.leave(requests[0])  # its place is that of one who drafts otherwise
    members.run(1)
    members.leave(requests[3])
    members.join(requests[3], (3, 2, 1), before)
    members.join(requests[4], (2, 3, 0, 4, 1, 2))
    members.run(2)
    members.leave(requests[2])
    members.leave(requests[3])
    members.join(requests[5], (4, 0, 3, 2))
    members.run(4)
    assert members.watched.compared > 40
