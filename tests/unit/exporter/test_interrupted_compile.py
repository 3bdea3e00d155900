"""Ctrl-C and SIGTERM end TensorRT's work within a graph, and leave the bundle as it was."""

from __future__ import annotations

import _thread
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vlmexport.exporter.tensorrt.builder import _captured_stderr
from vlmexport.exporter.tensorrt.interrupt import check, interruptible, make_monitor


def test_result_or_error_of_the_work_is_returned() -> None:
    assert interruptible(
        lambda stop: (threading.current_thread() is threading.main_thread(), stop.is_set())
    ) == (
        False,
        False,
    )
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda _: 1 / 0)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own way with Ctrl-C, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_stops_the_work_and_waits_for_it(times: int) -> None:
    """However often it is sent: nothing of the work goes on behind the call."""
    ended: list[bool] = []

    def work(stop: threading.Event) -> None:
        for _ in range(times):
            _thread.interrupt_main()
            time.sleep(0.02)
        assert stop.wait(30)
        time.sleep(0.05)
        ended.append(True)
        check(stop)

    with pytest.raises(KeyboardInterrupt):
        interruptible(work)
    assert ended == [True]


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_while_the_thread_starts_leaves_no_work_behind(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """`Thread.start` waits for the thread: an interrupt ends it before the thread has run, or when it has."""
    threads: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        threads.append(thread)
        if begun:
            start(thread)
        raise KeyboardInterrupt

    ended: list[bool] = []

    def work(stop: threading.Event) -> None:
        ended.append(stop.wait(30))

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        interruptible(work)
    known = list(ended)
    if not begun:
        start(threads[0])
    threads[0].join()
    assert ended == known and all(ended)


def test_a_monitor_ends_the_build_that_is_to_stop() -> None:
    stop = threading.Event()
    monitor = make_monitor(types.SimpleNamespace(IProgressMonitor=object), stop)
    assert monitor.step_complete("Timing", 1) is True
    stop.set()
    assert monitor.step_complete("Timing", 2) is False
    with pytest.raises(KeyboardInterrupt):
        check(stop)


def test_lines_of_the_compiler_are_collected_and_pythons_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():  # sys.stderr writes to descriptor 2 then, as outside of pytest
        reading, writing = os.pipe()
        kept, own = os.dup(2), sys.stderr
        os.dup2(writing, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        try:
            with pytest.raises(KeyboardInterrupt), _captured_stderr() as lines:
                os.write(2, b"compiler\n")
                threading.Thread(target=lambda: sys.stderr.write("bar\n")).start()
                raise KeyboardInterrupt
            sys.stderr.write("behind\n")
        finally:
            os.dup2(kept, 2)
            sys.stderr = own
            for descriptor in (kept, writing):
                os.close(descriptor)
        with os.fdopen(reading) as shown:
            assert shown.read() == "bar\nbehind\n"
    assert lines == ["compiler"]


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("ctrl_c")  # a signal that is ignored here would be ignored by the command
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_compile_ends_within_a_graph(
    tiny_bundle: Callable[..., Any], tmp_path: Path, number: signal.Signals
) -> None:
    """With the real library, which drops what its callbacks raise."""
    pytest.importorskip("tensorrt_rtx_libs")
    bundle = Path(shutil.copytree(tiny_bundle("llama")[0], tmp_path / "bundle"))
    before = content(bundle)
    line = [
        sys.executable,
        "-m",
        "vlmexport",
        "compile",
        str(bundle),
        "--backend",
        "tensorrt-rtx",
        "--target",
        "sm86",
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        said = ""
        while "graph 1/" not in said:
            said = running.stderr.readline()
            assert said, "it ended before it was interrupted"
        running.send_signal(number)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 128 + number and out == ""
    assert err.endswith("Interrupted.\n") and "Traceback" not in err and err.count("graph ") < 5
    assert content(bundle) == before and [p.name for p in tmp_path.iterdir()] == ["bundle"]
