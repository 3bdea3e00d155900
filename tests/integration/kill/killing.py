"""One kill: a command is killed before a call that changes files, run again, and what is there then is judged."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.kill.scenes import SCENES, Content, Scene, content, place, quietly, units
from tests.integration.kill.tracer import Trace, traced
from tests.support.forks import forked

LIMIT = 300.0
"""Seconds after which a command that is run again counts as a hang."""
OTHER = "OTHER"
"""In the words of a remedy: another output."""
EQUAL, REFUSED, FINISHED, FAILED = "equal", "refused", "finished", "failed"


@dataclass(frozen=True)
class Verdict:
    """How a case ended: `EQUAL` (run again, the output is that of a run that was not killed), `REFUSED` (with one line whose
    remedy led there), `FINISHED` (the command made fewer calls this time) or `FAILED` with its problem."""

    outcome: str
    problem: str = ""


@dataclass
class Stage:
    """A scene whose world is made: `points` are the calls of a run that is not killed, `after` what it leaves, `versions` what
    may be found under each name that must be whole."""

    name: str
    scene: Scene
    folder: Path
    points: list[tuple[str, str]] = field(default_factory=list)
    after: Content = field(default_factory=dict)
    versions: dict[str, set[str]] = field(default_factory=dict)

    @property
    def world(self) -> Path:
        return self.folder / "world"

    @property
    def inputs(self) -> Path:
        return self.folder / "inputs"

    def words(self) -> list[object]:
        return self.scene.words(self.world, self.inputs)

    def restore(self) -> None:
        """The world as it was before the command."""
        shutil.rmtree(self.world, ignore_errors=True)
        shutil.copytree(self.folder / "before", self.world)

    def content(self) -> Content:
        return content(self.world, measured=self.scene.measured)

    def watched(self, path: str) -> bool:
        return path.startswith(f"{self.world}/") and "/tensorboard" not in path

    def serve(self, words: list[object], record: bool = False) -> Callable[[], int]:
        """The command as a function for a fork."""

        def serve() -> int:
            _quiet(self.folder)
            if record:
                self._record_versions()
            return self.scene.serve(*words)

        return serve

    def errors(self) -> str:
        return (self.folder / "stderr").read_text("utf-8", "replace")

    def seen(self) -> dict[str, str]:
        """What stands under each name that must be whole."""
        found = {}
        for unit in units(self.scene, self.world):
            name = unit.relative_to(self.world).as_posix()
            found[name] = digest(content(unit, hidden=False, measured=self.scene.measured))
        return found

    def note(self, found: dict[str, str]) -> None:
        for name, value in found.items():
            self.versions.setdefault(name, set()).add(value)

    def _record_versions(self) -> None:
        """In the fork: writes down what is there after each of the functions that the scene names."""
        for named in self.scene.versions:
            module, path = named.split(":")
            owner, name = path.split(".")
            kind = getattr(importlib.import_module(module), owner)
            setattr(kind, name, self._noting(getattr(kind, name)))

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            with (self.folder / "versions").open("a") as out:
                out.write(json.dumps(self.seen()) + "\n")
            return found

        return noting


def digest(found: Content) -> str:
    """Of names and contents."""
    whole = hashlib.sha256()
    for name, data in sorted(found.items()):
        whole.update(f"{name} {len(data)} ".encode() + data)
    return whole.hexdigest()


def prepared(name: str, base: Path, scene: Scene | None = None) -> Stage:
    """Makes the world of a scene (default: the one of that name) below `base`, and runs its command once without and once with the tracer.

    Raises AssertionError where two runs that nobody kills differ, NoTracing where nothing can be traced.
    """
    stage = Stage(name, scene or SCENES[name], base / name.replace(" --", "-").replace(" ", "-"))
    shutil.rmtree(stage.folder, ignore_errors=True)
    for path in (stage.world, stage.inputs):
        path.mkdir(parents=True)
    with place(stage.folder):
        made = status_of(lambda: stage.scene.before(stage.world, stage.inputs) or 0)
        assert made == 0, f"{name}: its world cannot be made"
        shutil.copytree(stage.world, stage.folder / "before")
        stage.scene.stub()
        if stage.scene.warm:
            quietly(*stage.words())
            stage.restore()
        stage.note(stage.seen())
        status = status_of(stage.serve(stage.words(), record=True))
        assert status == 0, f"{name} ends with {status}: {stage.errors()}"
        stage.after = stage.content()
        stage.note(stage.seen())
        noted = stage.folder / "versions"
        for line in noted.read_text().splitlines() if noted.exists() else ():
            stage.note(json.loads(line))
        stage.restore()
        trace = traced(stage.serve(stage.words()), stage.watched)
        assert trace.status == 0, f"{name} ends with {trace.status} when it is traced: {stage.errors()}"
        assert not (wrong := differences(stage.content(), stage.after)), f"{name} run twice: {wrong}"
        stage.points = trace.points
    return stage


def judge(stage: Stage, number: int) -> Verdict:
    """Kills the command before its call of that number, runs it again, and compares. The number behind the last: it ends by
    itself, and is run again all the same."""
    with place(stage.folder):
        stage.restore()
        trace = traced(stage.serve(stage.words()), stage.watched, number)
        if not trace.killed and number < len(stage.points):
            return _judged(stage, trace.status, FINISHED)
        if wrong := _not_whole(stage, trace):
            return Verdict(FAILED, wrong)
        status = status_of(stage.serve(stage.words()))
        if status == 2:
            return _refused(stage)
        return _judged(stage, status, EQUAL)


def _not_whole(stage: Stage, trace: Trace) -> str:
    """What is neither that of before, nor a version that a run without a kill has; "" where all is."""
    found = stage.seen()
    before = {
        p.relative_to(stage.folder / "before").as_posix() for p in units(stage.scene, stage.folder / "before")
    }
    if gone := sorted(before - found.keys()):
        return f"after the kill {gone[0]} is gone"
    for name, value in found.items():
        if value not in stage.versions.get(name, ()):
            return f"after the kill {name} is neither the old one nor the new one"
    return ""


def _refused(stage: Stage) -> Verdict:
    """The command refuses what the kill left: with one line, and what that names helps."""
    lines = stage.errors().strip().splitlines()
    if len(lines) != 1:
        return Verdict(FAILED, f"refuses in {len(lines)} lines: {stage.errors()[-300:]}")
    for named, more in stage.scene.remedies:
        if named not in lines[0]:
            continue
        kept = stage.seen()
        words = [*stage.words(), *(stage.world / "other" if word == OTHER else word for word in more)]
        status = status_of(stage.serve(words))
        if OTHER not in more:
            return _judged(stage, status, REFUSED)
        if stage.seen() != kept:
            return Verdict(FAILED, "the output of before was changed")
        if status == 0 and len(kept) == 1:
            shutil.rmtree(stage.world / next(iter(kept)))
            (stage.world / "other").rename(stage.world / next(iter(kept)))
        return _judged(stage, status, REFUSED)
    return Verdict(FAILED, f"refuses, and names no remedy that is known: {lines[0]}")


def _judged(stage: Stage, status: int | None, outcome: str) -> Verdict:
    if status != 0:
        return Verdict(FAILED, f"run again, it ends with {status}: {stage.errors()[-400:]}")
    wrong = differences(stage.content(), stage.after)
    return Verdict(FAILED, f"run again, {wrong}") if wrong else Verdict(outcome)


def differences(found: Content, expected: Content) -> str:
    """The first few names that are too many, missing or of another content; "" for none."""
    what = [f"{name} is left over" for name in sorted(found.keys() - expected.keys())]
    what += [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    what += [
        f"{name} differs" for name in sorted(found.keys() & expected.keys()) if found[name] != expected[name]
    ]
    return ", ".join(what[:4])


def spread(points: int, most: int) -> list[int]:
    """At most `most` numbers of 0 .. points - 1, evenly."""
    if points <= most:
        return list(range(points))
    return [round(place * (points - 1) / (most - 1)) for place in range(most)] if most > 1 else [0]


def status_of(serve: Callable[[], int]) -> int:
    """The exit status of a function in a fork of this process; negative: the signal that ended it."""
    child = forked(serve)
    end, pause = time.monotonic() + LIMIT, 0.002
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(0.02, pause * 1.2)


def _quiet(folder: Path) -> None:
    """In a fork: output goes to files, and signals do what they do in a command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
