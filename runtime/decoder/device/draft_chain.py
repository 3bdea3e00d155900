"""What a draft gives to a cycle on a device: steps behind the hidden states of a pass, or a chain by graphs of its
own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from ...engines.base import Call, View

Keep = Callable[[int, "View", "View"], "list[Call]"]
"""(number, token int64 [1], log-probability float32 [1]) → what keeps the drafted token with this number, from 0 on."""


@dataclass(frozen=True, eq=False)
class Sent:
    """What a draft sends ahead in a cycle, of the shapes and types that its graphs read."""

    once: Mapping[str, np.ndarray]
    each: Mapping[str, np.ndarray]
    """[n, ...] each: entry k is the input NAME.k, of step k."""


NOTHING_SENT = Sent({}, {})


class DraftsOnDevice(Protocol):
    """A proposer with a `draft_step` (`speculative/proposer.py`)."""

    name: str

    def sent_on_device(self, count: int, start: int) -> Sent: ...
    def draft_step(
        self, hidden: View, outputs: dict[str, View], number: int, sent: Mapping[str, View]
    ) -> list[Call]: ...
    def last_step(self, hidden: View, number: int, sent: Mapping[str, View]) -> list[Call]: ...


@dataclass(frozen=True, eq=False)
class DeviceChain:
    """What one cycle of such a draft is made of. Chains with the same `key` differ in nothing but what they send: it
    says where the draft's own memory lies, how its caches are laid out, and its widths."""

    key: tuple[Hashable, ...]
    length: int
    """Drafted tokens."""
    sent: Sent
    """Inputs that the host knows."""
    bind: Callable[[Mapping[str, View], Keep], list[Call]]
    """From `sent` by name, where the engine has it, the calls that draft and keep every token."""
