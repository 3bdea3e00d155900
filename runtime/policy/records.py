"""What the controller notes: of a draft over the session, and of a request."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from ..speedup.budget import NOTHING, Budget
from .acceptance import Acceptance

LOSS = 0.03
"""Most time that a request may lose against plain decoding, as a share of it."""

RISK = 0.7
"""Share of a purse that a cycle of several drafted tokens may stake: a mistake leaves enough to go on with shorter drafts,
and with nothing after the shortest."""

PROBES = 0.01
"""Share of the time of plain decoding that probes may take."""

FLOOR = 60
"""Tokens of a request that the share is taken of until it is longer, or fewer where they pay for the longest chain being
rejected, and the shortest after it: a request must be allowed its first mistake and another try, and no more."""

SESSION_MEMORY, REQUEST_MEMORY = 200.0, 12.0
"""Drafted cycles after which counts have faded to 1/e."""

SESSION_WEIGHT, REQUEST_WEIGHT = 2.0, 6.0
"""Evaluated tokens that the prior of the session, and of a request, counts as."""

NEGLIGIBLE = 1e-3
"""A depth that is reached less often is not considered."""


@dataclass
class DraftRecord:
    """What is known of one draft: over the session, or over one request."""

    prior: list[float]
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(SESSION_MEMORY))
    hit_rate: float = 1.0
    """Share of the cycles with a budget in which the draft proposed anything."""
    floor: int = FLOOR
    """Tokens of a request that its share is taken of until it is longer."""
    shares_session_gain: bool = False
    """Whether a request may borrow what others gained."""
    gained: float = 0.0
    """Seconds gained against plain decoding in all requests, negative when lost; with an advance on a draft that
    `tune` saw."""
    probe_budget: float = 0.0
    """Seconds saved up for the next probe."""
    again: bool = False
    """The last drafted cycle gained: the next probe needs no credit."""
    cycles: int = 0
    """Drafted cycles so far."""
    rates: list[float] = field(default_factory=list)
    """Acceptance by depth."""

    def __post_init__(self) -> None:
        self.rates = self.acceptance.rates(self.prior, SESSION_WEIGHT)

    def add(self, proposed: int, accepted: int, evaluated: int) -> None:
        """One cycle that had a budget."""
        self.hit_rate += ((proposed > 0) - self.hit_rate) / SESSION_MEMORY
        if proposed:
            self.cycles += 1
            self.acceptance.add(accepted, evaluated)
            self.rates = self.acceptance.rates(self.prior, SESSION_WEIGHT)


@dataclass
class RequestRecord:
    """Notes on one request."""

    learned: DraftRecord
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(REQUEST_MEMORY))
    balance: float = 0.0
    """Seconds gained against plain decoding so far, negative when lost."""
    tokens: int = 0
    """Emitted in the cycles that the balance covers."""
    allotted: Budget = NOTHING
    """Of the cycle that is under way."""
    _survival: tuple[int, list[float]] = -1, []  # by `learned.cycles` when it was made

    def survival(self) -> list[float]:
        """Chance that depth 1, 2, … is accepted, as far as it matters."""
        made, survival = self._survival
        if made != self.learned.cycles:
            alive, survival = 1.0, []
            for rate in self.acceptance.rates(self.learned.rates, REQUEST_WEIGHT):
                alive *= rate
                if alive < NEGLIGIBLE:
                    break
                survival.append(alive)
            self._survival = self.learned.cycles, survival
        return survival

    def loss_budget(self, unit: float, worst_case_loss: float) -> float:
        """Seconds that may still be lost. `unit`: the time of one plain token; `worst_case_loss`: see `worst_loss`."""
        return self.balance + LOSS * max(
            min(self.learned.floor * unit, worst_case_loss / LOSS), self.tokens * unit
        )


def worst_loss(seconds: Items[float]) -> float:
    """What a rejected chain of the most costs, and one of the least after it. `seconds`: of a cycle, by length from 0."""
    return seconds[-1] + seconds[1] - 2 * seconds[0]
