"""Fixtures that all rooms share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import device_counts, every_run, pairs

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

# Before torch is imported: threads that share tiny matrices only wait for each other, on the processors of other workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")


KINDS = ("unit", "contract", "integration", "recipes")
"""Folders below this one: their tests have a marker of that name."""


def pytest_configure(config: pytest.Config) -> None:
    """Without the slow ones, products need not be collected whole: that alone would take a quarter of a minute."""
    pairs.whole_product = config.option.markexpr != "not slow"


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not walk through millions of its objects, at 0.7 s each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m contract` and the like select folders; costly cases are slow."""
    root = Path(__file__).parent
    for item in items:
        kind = item.path.relative_to(root).parts[0]
        if kind in KINDS:
            item.add_marker(kind)
    every_run.mark_the_rest_slow(items, f"{root}/")


def shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyBundle]:
    """`tiny_bundle(name)`: a bundle of `tiny_bundles.BUNDLES`, built once per run at its first use.

    Parallel workers share the folder: copy it before you change anything in it.

    With the environment variable VLMEXPORT_TINY_BUNDLES, a folder, bundles are kept there and those that a run before has
    built are used: empty it after a change of what builds them. A GPU that is paid by the minute need not wait for them.
    """
    pytest.importorskip("torch", reason="building the bundles needs [export]")
    from filelock import FileLock

    from tests.support import tiny_bundles  # torch is imported only by tests that ask

    shared = shared_by_workers(tmp_path_factory)
    if os.environ.get("VLMEXPORT_TINY_BUNDLES"):
        shared = Path(os.environ["VLMEXPORT_TINY_BUNDLES"]).resolve()
        shared.mkdir(parents=True, exist_ok=True)
    made: dict[str, TinyBundle] = {}

    def get(name: str) -> TinyBundle:
        if name not in made:
            folder = shared / f"tiny-{name}"
            with FileLock(shared / f"tiny-{name}.lock"):
                made[name] = tiny_bundles.load(name, folder) or tiny_bundles.build(name, folder)
        return made[name]

    return get


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Bundles that commands keep go into a folder of this worker; traces that are kept, into one that all workers share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLMEXPORT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("VLMEXPORT_KEPT_TRACES", str(shared_by_workers(tmp_path_factory) / "traces"))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_onnx_runtime() -> Iterator[None]:
    """Of a session that does not ask for more: a pool's idle threads spin, on the processors of other workers."""
    try:
        from vlmexport.runtime.engines import onnxruntime
    except ImportError:  # tests that need none
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "cores", lambda: 1)
        yield


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    """A command that a test runs may set PyTorch's threads for the whole process; with two, whose processors other workers
    use, every later test of the worker takes many times as long. (Of the first test that imports torch nothing is known.)"""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if before is not None and torch is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a cycle asked of the device of the contract suite, if any test ran one."""
    reports = [
        value
        for group in terminalreporter.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
        for name, value in report.user_properties
        if name == device_counts.PROPERTY
    ]
    if reports:
        terminalreporter.section("device.counts: means per cycle")
        for line in device_counts.table(reports):
            terminalreporter.write_line(line)
