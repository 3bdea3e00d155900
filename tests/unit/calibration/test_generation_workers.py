"""Small models answer in several processes: the same answers as in one, and none of them is left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from vlmexport.calibration.data.reading.records import ImageRef, Record
from vlmexport.calibration.generation import worker
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.calibration.generation.bundle_answers import BundleAnswers, _waves
from vlmexport.calibration.generation.messages import LOGGER, Failure
from vlmexport.calibration.generation.target_bundle import target_bundle
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import PromptError, VlmexportError

from tests.support.training_targets import make_records, make_target

SHORT, LONG = GenerationOptions(6), GenerationOptions(90, temperature=1.0, samples=20)

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import psutil
from vlmexport.calibration.data import load_records
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.calibration.generation.bundle_answers import BundleAnswers

answers = BundleAnswers(Path(sys.argv[1]), batch_size=2, threads=2)
records = load_records(sys.argv[2])
print(json.dumps(sorted(dict(answers.answer(records, GenerationOptions(6))).items())))
for _ in answers.answer(records, GenerationOptions(90, temperature=1.0, samples=20)):
    print(json.dumps([child.pid for child in psutil.Process().children()]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def records(folder: Path) -> list[Record]:
    return list(make_records(folder, "llama", 9))


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    make_target("llama", folder / "model")
    return target_bundle(str(folder / "model"), 96, lambda line: None, parity=False)


@pytest.fixture
def two(bundle: Bundle) -> Iterator[BundleAnswers]:
    """Two processes, ended with the test."""
    with closing(BundleAnswers(bundle, batch_size=2, threads=2)) as answers:
        yield answers


@pytest.fixture(scope="module")
def one(bundle: Bundle) -> BundleAnswers:
    return BundleAnswers(bundle, batch_size=2, threads=1)


def processes() -> list[psutil.Process]:
    """The workers of this process that are running."""
    return [p for p in psutil.Process().children() if worker.__name__ in p.cmdline()]


def gone(pids: list[int]) -> bool:
    """Whether all of them end within some seconds; one that nobody waits for is a zombie."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("options", [SHORT, GenerationOptions(6, 1.0, 3, seed=2)], ids=["greedy", "drawn"])
def test_processes_give_the_answers_of_one(
    one: BundleAnswers, two: BundleAnswers, records: list[Record], options: GenerationOptions
):
    assert one.sessions == (1, 2) and two.sessions == (2, 2)
    assert dict(two.answer(records, options)) == dict(one.answer(records, options))
    first = processes()
    assert len(first) == 2 and all(os.getsid(p.pid) != os.getsid(0) for p in first), "Ctrl-C is not theirs"
    assert dict(two.answer(records[:5], options)) == dict(one.answer(records[:5], options))
    assert processes() == first, "kept for the next call"


def test_single_wave_starts_no_process(bundle: Bundle, one: BundleAnswers, records: list[Record]):
    with closing(BundleAnswers(bundle, batch_size=4, threads=2)) as answers:
        assert dict(answers.answer(records[:4], SHORT)) == dict(one.answer(records[:4], SHORT))
        assert list(answers.answer([], SHORT)) == []
        assert processes() == []
        assert len(dict(answers.answer(records[:5], SHORT))) == 5 and len(processes()) == 2
    assert processes() == []


def test_unanswerable_records_are_reported_alike(
    one: BundleAnswers, two: BundleAnswers, records: list[Record]
):
    asked = [*records[:2], Record("long", "a cat " * 9000), records[2]]
    here, there = dict(one.answer(asked, SHORT)), dict(two.answer(asked, SHORT))
    assert isinstance(there[2], PromptError) and str(there[2]) == str(here.pop(2))
    del there[2]
    assert there == here and list(here) != []


def test_unexpected_worker_error_keeps_type_and_traceback(two: BundleAnswers, records: list[Record]):
    bad = Record("bad", "", ImageRef(scene=(0, -1)))
    with pytest.raises(ValueError, match="outside every split") as caught:
        list(two.answer([*records, bad], SHORT))
    assert ", in sample_scene" in str(caught.value.__cause__)
    assert processes() == []
    assert len(dict(two.answer(records, SHORT))) == len(records), "begins again"


def test_an_error_that_cannot_be_sent_is_told():
    class Local(Exception):
        pass

    failure = Failure.of(Local("why"))
    assert isinstance(failure.error, RuntimeError) and str(failure.error) == "Local: why"
    assert "Local: why" in failure.trace


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_killed_process_is_one_error(
    two: BundleAnswers, records: list[Record], number: signal.Signals, capfd: pytest.CaptureFixture[str]
):
    found = two.answer(records, LONG)
    next(found)
    victim = processes()[0]
    victim.send_signal(number)
    why = rf"process {victim.pid}, one of 2 that decoded, was ended by {number.name}; --threads 1"
    with pytest.raises(VlmexportError, match=why):
        list(found)
    assert processes() == []
    assert capfd.readouterr() == ("", ""), "no traceback of either process"


def test_a_process_that_ends_before_it_decodes_is_one_error(
    bundle: Bundle, records: list[Record], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    answers = BundleAnswers(bundle, batch_size=2, threads=2)
    monkeypatch.setattr(worker, "__name__", "vlmexport.calibration.generation.missing")
    with pytest.raises(VlmexportError, match=r"process \d+, one of 2 that decoded, ended with status 1, its"):
        list(answers.answer(records, SHORT))
    assert "No module named vlmexport.calibration.generation.missing" in capfd.readouterr().err


def test_a_process_that_cannot_be_started_is_one_error(
    bundle: Bundle, records: list[Record], monkeypatch: pytest.MonkeyPatch
):
    answers = BundleAnswers(bundle, batch_size=2, threads=2)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(VlmexportError, match=r"no process .* \(No such file or directory\); --threads 1"):
        list(answers.answer(records, SHORT))


def test_an_idle_process_that_was_killed_is_one_error(two: BundleAnswers, records: list[Record]):
    list(two.answer(records, SHORT))
    processes()[1].terminate()
    with pytest.raises(VlmexportError, match="was ended by SIGTERM"):
        list(two.answer(records, SHORT))


def test_an_iterator_that_is_closed_leaves_no_process(two: BundleAnswers, records: list[Record]):
    found = two.answer(records, LONG)
    next(found)
    with pytest.raises(VlmexportError, match="busy with other records"):
        next(two.answer(records, SHORT))
    assert len(processes()) == 2
    found.close()
    assert processes() == []


def test_close_ends_processes_and_what_they_do(bundle: Bundle, records: list[Record]):
    answers = BundleAnswers(bundle, batch_size=2, threads=2)
    found = answers.answer(records, LONG)
    next(found)
    answers.close()
    with pytest.raises(VlmexportError, match="closed while they decoded"):
        list(found)
    with pytest.raises(VlmexportError, match="closed; open the bundle again"):
        next(answers.answer(records, SHORT))
    assert processes() == []


def test_processes_end_with_their_owner_and_log_through_it(
    bundle: Bundle, records: list[Record], caplog: pytest.LogCaptureFixture, monkeypatch
):
    monkeypatch.chdir(bundle.path.parent)
    caplog.set_level(logging.DEBUG, LOGGER)
    answers = BundleAnswers(Bundle.open(bundle.path.name), batch_size=2, threads=2)
    list(answers.answer(records, SHORT))
    loaded = [r for r in caplog.records if r.getMessage().startswith("loaded head.onnx")]
    assert len({r.process for r in loaded} - {os.getpid()}) == 2
    libraries = {m.path for p in processes() for m in p.memory_maps()}
    assert any("onnxruntime" in path for path in libraries) and not any("torch" in p for p in libraries)
    pids = [p.pid for p in processes()]
    del answers
    assert gone(pids)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors as Linux lists them")
def test_workers_leave_no_open_files(bundle: Bundle, records: list[Record]):
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    answers = BundleAnswers(bundle, batch_size=2, threads=2)
    before = opened()
    for _ in range(3):
        found = answers.answer(records, LONG)
        next(found)
        assert opened() == before + 2, "a socket per process"
        found.close()
        assert opened() == before
    list(answers.answer(records, SHORT))
    answers.close()
    assert opened() == before


def test_a_worker_imports_what_it_needs():
    code = f"import sys, {worker.__name__}; print({{'torch', 'transformers', 'onnx'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_script_without_main_guard_and_killed_parent(one: BundleAnswers, records: list[Record], folder: Path):
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "script.py"), str(one.bundle.path), str(folder / "data.jsonl")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL and not done.stderr
    said, pids = map(json.loads, done.stdout.splitlines())
    expected = sorted(dict(one.answer(records, SHORT)).items())
    assert said == json.loads(json.dumps(expected))
    assert len(pids) == 2 and gone(pids)


@pytest.mark.parametrize("places", [0, 1, 31, 32, 33, 64, 65, 4000])
def test_waves_are_full_but_for_the_last(places: int):
    waves = _waves(places, 32)
    assert [place for wave in waves for place in wave] == list(range(places))
    assert all(len(wave) == 32 for wave in waves[:-1]) and all(waves)
