"""How long the controller can leave a request alone: its own work for a cycle takes a tenth of a small model's pass."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, NamedTuple
from weakref import ref

from ..speedup.predict import TreeGain
from .records import LOSS, PROBES, RISK, RequestRecord, worst_loss

FOREVER = 1 << 30


class Rest(NamedTuple):
    """A request that is decoded alone and plainly for some cycles more."""

    sequence: ref[Any]
    request: RequestRecord
    saved: float
    """For probes, in each of these cycles."""
    last: int
    """Tokens of the request in the balance when the last of these cycles begins."""

    def goes_on(self, sequences: Items[Any]) -> bool:
        """Whether nothing is allotted to these in the next cycle."""
        return self.request.tokens <= self.last and len(sequences) == 1 and sequences[0] is self.sequence()

    def observe(self) -> None:
        """Enter a cycle, as `Adaptive` does when it settles: a plain one gains and loses nothing."""
        self.request.tokens += 1
        self.request.learned.probe_budget += self.saved


def cycles_of_rest(
    request: RequestRecord,
    seconds: Items[float],
    trees: Items[tuple[TreeGain, float]],
    reached: Items[float],
    loss_budget: float,
) -> int:
    """After how many plain cycles of one sequence, to which nothing is allotted now, something may be, rather one too few:
    they change nothing but its purse and what is saved for probes."""
    learned, plain = request.learned, seconds[0]
    hit_rate = learned.hit_rate
    # Up to its floor a request's purse does not grow with it.
    flat = max(0.0, min(learned.floor, worst_loss(seconds) / (LOSS * plain)) - request.tokens)

    def earned(stake: float) -> float:
        return flat + (stake - loss_budget) / (LOSS * plain) if stake > loss_budget else 0.0

    def pays(expected: float, cost: float) -> bool:
        return expected * plain > (1 - 1e-9) * (hit_rate * cost + (1 - hit_rate) * plain)

    stakes: list[float] = []  # what the purse must hold for something that pays
    expected, stake = 1.0, 0.0
    for depth, tokens in enumerate(reached, 1):
        expected += hit_rate * tokens
        stake = max(stake, (seconds[depth] - plain) / (RISK if depth > 1 else 1.0))
        if pays(expected, seconds[depth]):
            stakes.append(stake)
            break
    for (tree, gain), cost in trees:
        if pays(1 + hit_rate * gain * sum(reached[: tree.depth]), cost):
            stakes.append((cost - plain) / RISK)
    waits = [earned(stake) for stake in stakes]
    for depth, cost in enumerate(seconds):
        loss = cost - plain
        if depth * plain > loss:  # the shape of probes
            saving = 0.0 if learned.again else (loss - learned.probe_budget) / (PROBES * plain)
            waits.append(max(saving, earned(loss)))
            break
    return max(0, int(min(waits, default=FOREVER)) - 1)
