"""Freed memory goes back to the system when a session is loaded."""

from __future__ import annotations

import ctypes
import sys
import types
from pathlib import Path

import pytest
from vlmexport.runtime.common import heap


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc"
)
def test_freed_memory_between_objects_is_given_back() -> None:
    blocks = [b"x" * 100_000 for _ in range(800)]  # below glibc's bound for memory of its own
    kept = blocks[::40]  # it cannot simply shrink the heap
    before = resident()
    del blocks
    heap.trim_heap()
    assert before - resident() > 60e6
    assert len(kept) == 20


def test_another_c_library_has_nothing_to_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: types.SimpleNamespace())
    heap.trim_heap()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: pytest.fail("asked for a library"))
    heap.trim_heap()
