"""Fixtures of the contract suite: oracles and rigs, each made once per session."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.support import device_counts
from tests.support.cycle_counts import counted
from tests.support.oracle import Oracle
from tests.support.plain_decoding import PlainDecoding
from tests.support.rig import ENGINES, FAMILIES, FLOAT_WEIGHTS, Rig
from tests.support.tiny_bundles import BUNDLES

KEPT = 2 * len(ENGINES)
"""Rigs that a process keeps, of some 300 MB each: those of a family, with one cut and with two."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of a family come one after the other, whatever they test: each rig is made once, and need not be kept for long."""
    cases = {place: family for place, item in enumerate(items) if (family := family_of(item)) is not None}
    moved = sorted(cases, key=lambda place: FAMILIES.index(cases[place]))
    taken = dict(zip(cases, moved, strict=True))
    items[:] = [items[taken.get(place, place)] for place in range(len(items))]


def family_of(item: pytest.Item) -> str | None:
    """Which one a case asks `rigs` for, if it shares nothing with its module that would have to be made again."""
    if (
        not isinstance(item, pytest.Function)
        or not hasattr(item, "callspec")
        or "rigs" not in item.fixturenames
    ):
        return None
    scopes = {each.scope for known in item._fixtureinfo.name2fixturedefs.values() for each in known}
    family = item.callspec.params.get("family")
    return family if family in FAMILIES and not scopes & {"module", "class"} else None


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other


@pytest.fixture(scope="session")
def oracle_for(tiny_bundle: Callable) -> Callable[[str], Oracle]:
    """`oracle_for(name)`: transformers on the checkpoint of the bundle `name`, whose matrices are rounded as the bundle's."""
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(tiny_bundle(name).checkpoint, BUNDLES[name].weights)
        return made[name]

    return get


@pytest.fixture(scope="session")
def rigs(tiny_bundle: Callable, oracle_for: Callable) -> Callable[[str, str], Rig]:
    """`rigs(name, engine)`: the bundle `name` on an engine of `rig.ENGINES`, with a new decoder at every call. Those that were
    not asked for longest are let go: all of them take 10 GB in each process. Engines that compute with integers are compared
    with their own plain decoding."""
    made: dict[tuple[str, str], Rig] = {}

    def make(name: str, engine: str) -> Rig:
        tiny, oracle = tiny_bundle(name), oracle_for(name)
        if BUNDLES[name].weights is None or engine == FLOAT_WEIGHTS:
            return Rig(tiny, engine, oracle)
        return Rig(tiny, engine, PlainDecoding(Rig(tiny, engine, oracle, max_batch=1)))

    def get(name: str, engine: str) -> Rig:
        found = made.pop((name, engine), None)
        if len(made) >= KEPT:
            let_go(made)
        made[name, engine] = found or make(name, engine)
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
