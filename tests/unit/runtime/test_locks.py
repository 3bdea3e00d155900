"""Processes that write to one place take turns, or the second one is refused; nothing they leave is in anybody's way."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vlmexport.runtime.bundle import manifest_changes
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest_changes import (
    LOCK,
    UNFINISHED,
    change_manifest,
    locked,
    reseal,
    store_costs,
)
from vlmexport.runtime.common import locks
from vlmexport.runtime.common.atomic_files import atomic_write, is_scratch
from vlmexport.runtime.common.errors import BundleError, OptionError
from vlmexport.runtime.common.locks import alone, only_one

from tests.support import handmade_bundle

HOLD = (
    "import sys; from pathlib import Path; from vlmexport.runtime.{module} import {name} as hold\n"
    "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


def other(module: str, name: str, path: Path) -> subprocess.Popen[str]:
    """Another process that is inside the block until its input ends."""
    command = [sys.executable, "-c", HOLD.format(module=module, name=name), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return handmade_bundle.write_bundle(tmp_path / "bundle")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- lock files ---


def test_waiting_for_a_lock_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "PATIENCE", 0.01)
    with other("common.locks", "alone", tmp_path / "lock") as process:
        threading.Timer(0.3, process.communicate).start()
        with alone(tmp_path / "lock"):
            assert process.wait(10) == 0, "it was inside the block, too"
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [r.getMessage() for r in said] == [f"waiting for another process that works on {tmp_path}"]
    caplog.clear()
    with alone(tmp_path / "lock"):
        pass
    assert not caplog.records


def test_second_lock_is_refused_and_a_killed_owner_is_released(tmp_path: Path) -> None:
    with other("common.locks", "only_one", tmp_path / "lock") as process:
        with (
            pytest.raises(
                OptionError, match=f"another process writes to {tmp_path}: wait for it, or .*; do this"
            ),
            only_one(tmp_path / "lock", remedy="; do this"),
        ):
            pass
        process.kill()
        process.wait()
        with only_one(tmp_path / "lock"):
            pass
    assert names(tmp_path) == ["lock"]
    with only_one(tmp_path / "lock", kept=False), pytest.raises(OptionError), only_one(tmp_path / "lock"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_file_system_without_locks_does_not_wait(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As some network and FUSE file systems answer."""
    # Not a function of this module, whose exception would be the program's own.
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with alone(tmp_path / "lock"), only_one(tmp_path / "lock"):
        store_costs(bundle, [{"machine": "m", "threads": 1}])
    assert len(Bundle.open(bundle).manifest.costs) == 1


# --- files that are replaced ---


def test_concurrent_writers_use_separate_scratch_files(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with atomic_write(path) as first:
        first.write(b"first, and long")
        with atomic_write(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first, and long" and names(tmp_path) == ["report.json"]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "report[1].json"
    code = (
        "import os, sys; from pathlib import Path; from vlmexport.runtime.common.atomic_files import atomic_write\n"
        "with atomic_write(Path(sys.argv[1])) as out: out.write(b'half'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    (left,) = names(tmp_path)
    assert is_scratch(left, path.name) and not is_scratch(left, "report.json")
    with atomic_write(path) as living, atomic_write(path) as out:
        assert left not in names(tmp_path) and len(names(tmp_path)) == 2
        living.write(b"a")
        out.write(b"whole")
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("name", [".report.draft-2.new", ".report.0123abcg.new", ".report.0123abcd.k.new"])
def test_user_files_are_not_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / ".report.0123abcd.new").write_text("half")
    with atomic_write(tmp_path / "report") as out:
        out.write(b"whole")
    assert names(tmp_path) == sorted([name, "report"])


def test_lock_file_has_shared_permissions(tmp_path: Path) -> None:
    with alone(tmp_path / "lock"):
        assert (tmp_path / "lock").stat().st_mode & 0o666 == 0o666


def test_errors_name_the_file_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, atomic_write(tmp_path / "no" / "file"):
        pass
    assert caught.value.filename == str(tmp_path / "no" / "file")
    with pytest.raises(OSError, match="full") as full, atomic_write(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "full")
    assert full.value.filename == str(tmp_path / "file")
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "file"):
        raise KeyboardInterrupt
    long = tmp_path / ("x" * 255)
    with atomic_write(long) as out:
        out.write(b"1")
    assert names(tmp_path) == [long.name]


# --- manifests ---

WRITER = """
import json, sys
from pathlib import Path
from vlmexport.runtime.bundle.manifest_changes import reseal, store_costs
bundle, name = Path(sys.argv[1]), sys.argv[2]
for number in range(60):
    store_costs(bundle, [{"machine": f"{name}{number}", "threads": 1}])
    if number % 20 == 0:
        reseal(bundle)
"""


def test_concurrent_manifest_entries_are_all_written(bundle: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(bundle), name]) for name in "AB"]
    read = 0
    while any(writer.poll() is None for writer in writers):
        found = [entry["machine"] for entry in Bundle.open(bundle, check="sha256").manifest.costs]
        assert len(found) >= read
        read = len(found)
        time.sleep(0.005)
    assert [writer.returncode for writer in writers] == [0, 0]
    found = {entry["machine"] for entry in Bundle.open(bundle).manifest.costs}
    assert found == {f"{name}{number}" for name in "AB" for number in range(60)}
    assert not [name for name in names(bundle) if name.startswith(".")]


def test_threads_take_turns_too(bundle: Path) -> None:
    def write(name: str) -> None:
        for number in range(8):
            store_costs(bundle, [{"machine": f"{name}{number}", "threads": 1}])

    threads = [threading.Thread(target=write, args=(name,)) for name in "ABC"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Bundle.open(bundle).manifest.costs) == 24


def test_leftovers_of_writers_are_no_part_of_a_bundle(bundle: Path) -> None:
    for name in (LOCK, UNFINISHED, ".manifest.json.0a1b2c3d.new"):
        (bundle / name).write_text("{")
    Bundle.open(bundle)
    reseal(bundle)
    assert not [name for name in names(bundle) if name.startswith(".")]
    for name in (".manifest.json.new.txt", ".lock", ".weights.bin.0a1b2c3d.new"):
        (bundle / name).write_text("{")
        with pytest.raises(BundleError, match="not listed in the manifest"):
            Bundle.open(bundle)
        (bundle / name).unlink()


@pytest.mark.parametrize("name", [LOCK, UNFINISHED, ".manifest.json.0a1b2c3d.new"])
def test_folder_in_place_of_the_lock_file_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).mkdir()
    with pytest.raises(BundleError, match="is a folder, where writers of the bundle have a file; remove it"):
        Bundle.open(bundle)


def test_writer_waits_for_a_folder_swap(bundle: Path) -> None:
    """An exchange of folders and a change of the manifest exclude each other, and the change is the new folder's."""
    new = handmade_bundle.write_bundle(bundle.with_name("new"), "llama")
    began, done = threading.Event(), threading.Event()

    def change() -> None:
        began.set()
        store_costs(bundle, [{"machine": "late", "threads": 1}])
        done.set()

    with locked(bundle):
        thread = threading.Thread(target=change)
        thread.start()
        began.wait()
        time.sleep(0.05)
        assert not done.is_set()
        old = bundle.rename(bundle.with_name("old"))
        new.rename(bundle)
    thread.join()
    opened = Bundle.open(bundle).manifest
    assert opened.model.family == "llama" and [entry["machine"] for entry in opened.costs] == ["late"]
    assert not Bundle.open(old).manifest.costs
    assert not [name for name in names(bundle) if name.startswith(".")]


def test_read_only_folder_is_one_line(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(bundle / LOCK))
    before = (bundle / "manifest.json").read_bytes()
    monkeypatch.setattr(manifest_changes, "alone", Mock(side_effect=error))  # root may write anywhere
    with pytest.raises(
        OptionError, match=r"cannot be written \(Permission denied\); save into a copy of the bundle"
    ):
        store_costs(bundle, [])
    assert (bundle / "manifest.json").read_bytes() == before


def test_no_lock_outside_of_bundles(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BundleError, match=r"holds no manifest\.json"):
            reseal(place)
    with pytest.raises(BundleError, match="does not exist"), locked(tmp_path / "nowhere"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OptionError("no"), OSError(errno.ENOSPC, "full")])
def test_a_change_that_fails_changes_nothing(bundle: Path, error: BaseException) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}

    def fail(document: Any) -> None:
        document["costs"] = [{"machine": "m", "threads": 1}]
        raise error

    with pytest.raises(type(error)):
        change_manifest(bundle, fail)
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    reseal(bundle)


# --- a bundle that is replaced while it is open ---


def touched(path: Path) -> None:
    """Another file with the same bytes."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def another(path: Path) -> None:
    """Another file of the same size."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes(255 - byte for byte in content))


def in_place(path: Path) -> None:
    """The same file with other bytes."""
    with path.open("r+b") as file:
        file.write(b"\0" * 8)
    os.utime(path, ns=(1, 1))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


READ: dict[str, Callable[[Bundle], object]] = {
    "tokenizer.json": lambda bundle: bundle.tokenizer,
    "weights.bin": lambda bundle: bundle.tensor("embedding_table"),
}


@pytest.mark.parametrize("name", list(READ))
@pytest.mark.parametrize("change", [another, in_place, pipe, a_folder, Path.unlink])
def test_replaced_file_is_not_read_later(bundle: Path, name: str, change: Callable[[Path], object]) -> None:
    opened = Bundle.open(bundle)
    change(bundle / name)
    with pytest.raises(BundleError, match="was replaced since the bundle was opened; load the session again"):
        READ[name](opened)


@pytest.mark.parametrize("name", list(READ))
def test_a_file_that_changes_while_it_is_read_is_not_used(bundle: Path, name: str) -> None:
    opened = Bundle.open(bundle)
    for error in (None, BundleError("the library's own")):
        with pytest.raises(BundleError, match="was replaced since"), opened.reading(name):
            another(bundle / name)
            if error is not None:
                raise error
        another(bundle / name)  # as it was


def test_loaded_bytes_stay_and_equal_bytes_are_accepted(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    table = opened.tensor("embedding_table").copy()
    tokenizer = opened.tokenizer
    for path in list(bundle.iterdir()):
        touched(path)
    with opened.reading(*opened.manifest.files):
        pass
    for path in list(bundle.iterdir()):
        another(path)
    assert (opened.tensor("embedding_table") == table).all() and opened.tokenizer is tokenizer


def test_other_process_sees_the_replaced_bundle(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    _ = opened.tokenizer, opened.tensor("embedding_table")
    sent = pickle.dumps(opened.unread())
    assert pickle.loads(sent).tokenizer.vocab_size == opened.tokenizer.vocab_size
    shutil.move(bundle, tmp_path / "old")
    handmade_bundle.write_bundle(bundle, default_prompt="another")
    document = json.loads((bundle / "tokenizer.json").read_text())
    (bundle / "tokenizer.json").write_text(json.dumps(document, indent=1))
    with pytest.raises(BundleError, match=r"tokenizer\.json: was replaced since"):
        _ = pickle.loads(sent).tokenizer
