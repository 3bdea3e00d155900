"""The campaign of hostile inputs and the soak run: a few cases of each, and that they notice what they are for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "fuzz"))

from cases import Case, judge  # noqa: E402


def crash() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def hang() -> int:
    time.sleep(60)
    return 0


def stumble() -> int:
    raise KeyError("odd")


def devour() -> int:
    held = bytearray(1200 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    return 0


def chatter() -> int:
    sys.stderr.write("vlmexport: one\nand two\n")
    return 2


@pytest.mark.parametrize(
    ("serve", "problem"),
    [
        (crash, "ends by signal SIGSEGV"), (hang, "hangs for more than 1 s"), (stumble, "a traceback"), (devour, "GB"),
        (chatter, "2 lines of errors"), (lambda: 3, "exit status 3"), (lambda: 0, "another answer"), (lambda: 2, None),
    ],
)  # fmt: skip
def test_what_counts_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[[], int], problem: str | None
) -> None:
    monkeypatch.setattr("cases.MEMORY", 1 << 30)  # a machine of tests may not have the campaign's

    def refusal() -> int:
        sys.stderr.write("vlmexport: no\n")
        return serve()

    def wrong(status: int, output: str) -> str | None:
        return None if status else "another answer"

    limit = 1.0 if serve is hang else 60.0
    quiet = serve in (crash, hang, stumble, devour, chatter)
    verdict = judge(Case(serve if quiet else refusal, wrong, limit=limit), tmp_path)
    assert verdict.problem == problem if problem is None else problem in str(verdict.problem)


def test_some_cases_of_every_kind_end_well(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "fuzz" / "campaign.py"), "--count", "30", "--seed", "7"]
    command += ["--save", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failures"] == [] and len(found["kinds"]) == 6
    for kind, row in found["kinds"].items():
        assert row.get("refused", 0) + row.get("served", 0) == 5, kind
        assert row.get("refused", 0) > 0, f"{kind}: nothing is refused: are these mutants?"


def test_some_hundred_mixed_requests_on_one_session(tiny_bundle: Callable, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(TESTS / "soak" / "soak.py"),
        str(tiny_bundle("t5").path),
        "--requests",
        "400",
    ]
    command += ["--save", str(tmp_path / "found.json")]
    subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = json.loads((tmp_path / "found.json").read_text())
    # So few requests fill caches still: memory is the business of `make soak`.
    assert [problem for problem in found["problems"] if "memory" not in problem] == []
    assert found["requests"] >= 400 and min(found["calls"].values()) > 3
