"""Decoding without a model, timed by the virtual clock: controllers are judged by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vlmexport.runtime.measure.virtual_clock import Reading
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.cost_model import CostTable


def cycles(table: CostTable, draft: str, recorded: Iterable[tuple[int, int]]) -> Reading:
    """Chains of one sequence as (drafted tokens, accepted tokens) per cycle; the bonus or correction comes on top."""
    seconds = tokens = 0.0
    for proposed, accepted in recorded:
        seconds += table.cycle_seconds(draft, proposed)
        tokens += accepted + 1
    return Reading(seconds, tokens * table.token_seconds())


Outcome = Callable[[int, Budget], tuple[int, int]]
"""(tokens emitted so far, budget) → (drafted tokens, accepted of them) of the cycle that follows."""


class Policy(Protocol):
    """What is asked of a policy."""

    def allot(self, sequences: Sequence[Any]) -> list[Budget]: ...
    def observe(self, sequence: Any, proposed: int, verdict: Verdict) -> None: ...


@dataclass(eq=False)
class Simulated:
    """A sequence without a model: `outcome` says what its draft would have done."""

    outcome: Outcome
    length: int
    """Tokens to decode, the first excluded."""
    proposer: Any
    """Has the `name` of a draft."""
    tokens: list[int] = field(default_factory=lambda: [0])
    recorded: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of every cycle."""

    @property
    def left(self) -> int:
        """Tokens still to decode."""
        return self.length + 1 - len(self.tokens)


def play(policy: Policy, batch: Sequence[Simulated], table: CostTable) -> Reading:
    """Decode sequences with the same draft together until all are done; those that are done leave the batch.

    Plain decoding is the same batch, leaving at the same tokens, one token each per pass.
    """
    seconds = 0.0
    running = [sequence for sequence in batch if sequence.left]
    while running:
        name = running[0].proposer.name
        widest, deepest, outcomes = 0, 0, []
        for sequence, budget in zip(running, policy.allot(running), strict=True):
            room = budget.within(budget.nodes, sequence.left - 1)
            deepest = max(deepest, room.depth)
            proposed, accepted = (0, 0) if room.empty else sequence.outcome(len(sequence.tokens), room)
            assert 0 <= accepted <= proposed <= room.nodes, "an outcome keeps to its budget"
            widest = max(widest, proposed)
            outcomes.append((sequence, proposed, accepted, min(accepted + 1, proposed, room.depth)))
        seconds += table.cycle_seconds(name, min(widest, deepest), widest, len(running))
        for sequence, proposed, accepted, evaluated in outcomes:
            sequence.tokens += [0] * (accepted + 1)
            sequence.recorded.append((proposed, accepted))
            policy.observe(sequence, proposed, Verdict(list(range(1, accepted + 1)), 0, evaluated))
        running = [sequence for sequence in running if sequence.left]
    return Reading(seconds, plain_seconds(table, [sequence.length for sequence in batch]))


def plain_seconds(table: CostTable, lengths: Sequence[int]) -> float:
    """Seconds of decoding sequences of these lengths together, one token each per pass, leaving when done."""
    return sum(
        table.token_seconds(sum(length > at for length in lengths)) for at in range(max(lengths, default=0))
    )
