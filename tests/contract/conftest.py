"""Fixtures of the contract suite: oracles and rigs, each made once per session."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import device_counts
import psutil
import pytest
import torch
from cycle_counts import counted
from oracle import Oracle
from rig import Rig


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other


@pytest.fixture(scope="session")
def oracle_for(tiny_bundle: Callable) -> Callable[[str], Oracle]:
    """`oracle_for(name)`: transformers on the checkpoint of the bundle `name`."""
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(tiny_bundle(name).checkpoint)
        return made[name]

    return get


@pytest.fixture(scope="session")
def rigs(tiny_bundle: Callable, oracle_for: Callable) -> Callable[[str, str], Rig]:
    """`rigs(name, engine)`: the bundle `name` on an engine of `rig.ENGINES`, with a new decoder at every call. Those that were
    not asked for longest are let go where memory runs short: all rows of the table take 12 GB in each process."""
    made: dict[tuple[str, str], Rig] = {}

    def get(name: str, engine: str) -> Rig:
        found = made.pop((name, engine), None)
        while made and is_scarce(psutil.virtual_memory()):
            let_go(made)
        made[name, engine] = found or Rig(tiny_bundle(name), engine, oracle_for(name))
        return made[name, engine] if found is None else found.fresh()

    return get


def let_go(made: dict[Any, Any]) -> None:
    """Drops the older half. Not one by one: every collection goes through all objects, and what is freed shows only when the
    allocator has given it back."""
    for key in list(made)[: -(-len(made) // 2)]:
        del made[key]
    gc.collect()
    if trim := sys.platform == "linux" and getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def is_scarce(memory: Any) -> bool:
    """Whether less than a quarter of the machine's memory can be had."""
    return memory.available < memory.total / 4


@pytest.fixture(autouse=True)
def _count_cycles(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> Iterator[None]:
    """What the cycles of a family with a draft asked of a device; the run ends with a table of it."""
    case = getattr(request.node, "callspec", None)
    if case is None or not {"family", "draft"} <= case.params.keys():
        yield
        return
    with counted(monkeypatch) as tallies:
        yield
    for name, tally in tallies.items():
        report = (case.params["family"], case.params["draft"], name, tally.cycles, asdict(tally.counts))
        record_property(device_counts.PROPERTY, report)
