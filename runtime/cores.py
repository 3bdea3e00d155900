"""How many processor cores this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores of this process's affinity mask; all of the machine's where the system has none."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1
