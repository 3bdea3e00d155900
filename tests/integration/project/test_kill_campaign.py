"""Kills for real: what the tracer sees, what the judge finds, and some kills of every command (`make kill` has all)."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vlmexport.exporter.output import exchange, whole_folder
from vlmexport.exporter.output.leftovers import remove_leftovers

from tests.integration.kill.killing import EQUAL, FAILED, REFUSED, judge, prepared, spread
from tests.integration.kill.scenes import SCENES, Scene
from tests.integration.kill.tracer import NoTracing, traced
from tests.support.programs import environment, program


@pytest.fixture(autouse=True)
def tracing() -> None:
    try:
        traced(lambda: 0, lambda _: False)
    except NoTracing as error:
        pytest.skip(str(error))


def busy(folder: Path) -> int:
    """Writes by a thread, a process, another program, and each call that Python has for it."""
    writer = threading.Thread(target=(folder / "thread").write_bytes, args=(b"x",))
    writer.start()
    writer.join()
    child = os.fork()
    if child == 0:
        (folder / "fork").write_bytes(b"x")
        os._exit(0)
    os.waitpid(child, 0)
    (folder / "a.new").write_bytes(b"hello")
    (folder / "a.new").replace(folder / "a")
    os.chdir(folder)
    Path("link").symlink_to("a")
    Path("b").hardlink_to("a")
    Path("folder").mkdir()
    Path("folder").rmdir()
    Path("b").unlink()
    with Path("a").open("r+b") as file:
        file.truncate(3)
        os.fsync(file.fileno())
    subprocess.run(["/bin/sh", "-c", "echo x > program"], check=True)
    (folder.parent / "elsewhere").write_bytes(b"x")
    Path("a").read_bytes()
    return 3


CALLS = [
    ("openat", "thread"), ("write", "thread"), ("openat", "fork"), ("write", "fork"), ("openat", "a.new"), ("write", "a.new"),
    ("rename", "a.new"), ("symlink", "link"), ("link", "a"), ("mkdir", "folder"), ("rmdir", "folder"), ("unlink", "b"),
    ("openat", "a"), ("ftruncate", "a"), ("fsync", "a"), ("openat", "program"), ("write", "program"),
]  # fmt: skip


def plain(call: str) -> str:
    """A call without what its name has on machines that have no other (aarch64 has no `rename`)."""
    return {
        "renameat": "rename",
        "unlinkat": "unlink",
        "mkdirat": "mkdir",
        "linkat": "link",
        "symlinkat": "symlink",
    }.get(call, call)


def test_every_call_that_changes_the_folder_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    found = traced(lambda: busy(folder), lambda path: path.startswith(f"{folder}/"))
    assert found.status == 3 and not found.killed
    seen = [(plain(call), Path(path).name) for call, path in found.points]
    if os.uname().machine == "x86_64":
        assert seen == CALLS
    assert {name for _, name in seen} == {name for _, name in CALLS}


def test_a_kill_comes_before_the_call(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def write() -> int:
        for name in "abcd":
            (folder / name).write_bytes(b"x")
        return 0

    for number in range(8):
        for path in folder.iterdir():
            path.unlink()
        found = traced(write, lambda path: path.startswith(f"{folder}/"), number)
        assert found.killed and found.status == -9 and len(found.points) == number
        there = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert there == {
            name: b"x" if 2 * at + 2 <= number else b"" for at, name in enumerate("abcd") if 2 * at < number
        }
    assert not traced(write, lambda path: path.startswith(f"{folder}/"), 8).killed


def over(path: Path) -> None:
    path.write_bytes(b"new" * 9)


def moved(path: Path) -> None:
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(b"new" * 9)
    scratch.replace(path)


def littering(path: Path) -> None:
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    scratch.write_bytes(b"new" * 9)
    scratch.replace(path)


def removing(path: Path) -> None:
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(b"new" * 9)
    path.unlink()
    scratch.rename(path)


def adding(path: Path) -> None:
    with path.with_name("log").open("a") as out:
        out.write("a line\n")
    moved(path)


def refusing(path: Path, *words: str) -> int:
    if path.with_name("begun").exists() and "--again" not in words:
        sys.stderr.write("it was begun; give --again\n")
        return 2
    path.with_name("begun").write_bytes(b"")
    moved(path)
    path.with_name("begun").unlink()
    return 0


def chatting(path: Path, *words: str) -> int:
    if path.with_name("begun").exists():
        sys.stderr.write("it was begun\n--again\n")
        return 2
    return refusing(path, *words)


def crashing(path: Path, *words: str) -> int:
    return 70 if "--again" in words else refusing(path, *words)


WRITERS: dict[str, tuple[Callable[..., int | None], str]] = {
    "a file is moved into its place": (moved, ""),
    "a file is written in place": (over, "neither the old one nor the new one"),
    "scratch files have names of their own and nobody removes them": (littering, "is left over"),
    "the old one is removed first": (removing, "is gone"),
    "a run adds to what the killed one wrote": (adding, "log differs"),
    "a refusal names a remedy that works": (refusing, ""),
    "a refusal in two lines": (chatting, "refuses in 2 lines"),
    "a refusal names a remedy that does not work": (crashing, "ends with 70"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_careless_writer_is_detected(what: str, tmp_path: Path) -> None:
    writer, problem = WRITERS[what]
    scene = Scene(
        lambda world, _: [world / "file"],
        lambda world, _: (world / "file").write_bytes(b"old") and None,
        ("file",),
        remedies=(("--again", ("--again",)),),
        serve=lambda *words: writer(*words) or 0,
    )
    stage = prepared("toy", tmp_path, scene)
    verdicts = [judge(stage, number) for number in range(len(stage.points))]
    failed = [verdict.problem for verdict in verdicts if verdict.outcome == FAILED]
    if problem:
        assert failed and all(problem in said for said in failed), verdicts
    else:
        assert not failed and {v.outcome for v in verdicts} <= {EQUAL, REFUSED}
        assert (REFUSED in {v.outcome for v in verdicts}) == (writer is refusing)


def folder_of_two(path: Path, number: int) -> None:
    for name in ("a", "b"):
        (path / name).write_text(f"{name} {number}")


@pytest.fixture(params=["in one step", "in two steps"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "in two steps":
        monkeypatch.setattr(exchange, "exchange", lambda *_: False)
    yield request.param


def test_a_folder_is_replaced_as_a_whole(steps: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def write() -> int:
        with whole_folder(folder) as work:
            folder_of_two(work, 2)
        return 0

    def seen() -> set[str]:
        return {path.read_text()[2:] for path in folder.iterdir()}

    gone = 0
    for number in range(100):
        folder_of_two(folder, 1)
        found = traced(write, lambda path: path.startswith(str(tmp_path)), number)
        gone += not folder.exists()
        remove_leftovers(folder)
        assert seen() in ({"1"}, {"2"}) and len(list(folder.iterdir())) == 2, found.points[-1]
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
        if not found.killed:
            break
    assert not found.killed and seen() == {"2"}
    assert gone == (steps == "in two steps")
    calls = [(plain(call), Path(path)) for call, path in found.points]
    synced = {path.name for call, path in calls if call == "fsync"}
    moved_at = next(at for at, (call, _) in enumerate(calls) if call in ("rename", "renameat2"))
    before = {path.name for call, path in calls[:moved_at] if call == "fsync"}
    assert {"a", "b"} < before and len(before) == 3  # with the folder itself
    assert synced - before == {tmp_path.name}


def test_points_are_spread_over_all() -> None:
    assert spread(5, 10) == [0, 1, 2, 3, 4] and spread(0, 10) == []
    assert spread(1001, 3) == [0, 500, 1000] and spread(9, 1) == [0]
    assert len(set(spread(201, 200))) == 200


def campaign(*words: object) -> subprocess.CompletedProcess:
    command = program("tests.integration.kill.campaign", *words)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


QUICK = ("tune --merge",)


@pytest.mark.parametrize(
    ("names", "points"),
    [(QUICK, 2), pytest.param(tuple(n for n in SCENES if n not in QUICK), 4, marks=pytest.mark.slow)],
    ids=["quick", "others"],
)
def test_sample_kills_of_every_command(names: tuple[str, ...], points: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="training needs [train]")
    pytest.importorskip("onnxscript", reason="exporting needs [export]")
    saved = tmp_path / "found.json"
    words: list[object] = [word for name in names for word in ("--command", name)]
    done = campaign(*words, "--points", points, "--save", saved)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(saved.read_text())["commands"]
    for name in names:
        row = rows[name]
        assert row["equal"] + row["refused"] == row["points"] == min(points, row["calls"]), name
        assert row["finished"] == 0 and row["failures"] == []
        assert row["again"] == ("refused" if SCENES[name].remedies else "equal"), name


def test_parts_of_a_campaign_make_one_table(tmp_path: Path) -> None:
    def part(name: str, first: int, last: int, **changes: Any) -> str:
        row = {
            "calls": 9, "points": 6, "ranges": [[first, last]], "kinds": {"write": last - first}, "equal": last - first,
            "refused": 0, "finished": 0, "failed": 0, "failures": [], "seconds": 1.0,
        }  # fmt: skip
        path = tmp_path / f"{name}-{first}-{last}-{len(changes)}.json"
        path.write_text(json.dumps({"machine": {}, "commands": {name: row | changes}}))
        return str(path)

    parts = [part("build", 3, 6), part("build", 0, 3), part("train", 0, 6)]
    done = campaign("--merge", *parts, "--save", tmp_path / "all.json")
    assert done.returncode == 0 and "| build | 9 | 6 | 6 | 0 | 0 | 0 |" in done.stdout
    found = json.loads((tmp_path / "all.json").read_text())["commands"]
    assert found["build"]["ranges"] == [[0, 3], [3, 6]] and found["build"]["kinds"] == {"write": 6}
    assert "in two files" in campaign("--merge", *parts, part("build", 5, 6)).stderr
    assert "other points" in campaign("--merge", *parts, part("build", 6, 7, calls=8)).stderr
    assert campaign("--merge", part("build", 0, 1, failed=1)).returncode == 1
