"""Counts what every cycle of a test asks of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from vlmexport.runtime.speculative.cycle import Cycle

from tests.support.engines.emulated import Asked
from tests.support.engines.recording_device import RecordingDevice
from tests.support.engines.stream import Counts


@dataclass
class Tally:
    """All cycles of one device."""

    cycles: int = 0
    counts: Counts = field(default_factory=Counts)


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[dict[str, Tally]]:
    """Gives a dictionary that every cycle on a device is added to, by the device's name."""
    tallies: dict[str, Tally] = {}
    run = Cycle.run

    def counting(cycle: Cycle) -> Any:
        device = cycle.decoder.engine
        if not isinstance(device, RecordingDevice | Asked):
            return run(cycle)
        before = device.counts.copy()
        result = run(cycle)
        tally = tallies.setdefault(device.name, Tally())
        tally.cycles, tally.counts = tally.cycles + 1, tally.counts + (device.counts - before)
        return result

    with patch.context() as context:
        context.setattr(Cycle, "run", counting)
        yield tallies
