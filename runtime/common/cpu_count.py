"""How many processor cores this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores of this process's affinity mask; all of the machine's where the system has none."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS, Windows
