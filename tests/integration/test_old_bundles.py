"""Bundles that an earlier revision wrote run, and give the tokens that it gave (old_bundles/README.md)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime import Session

HERE = Path(__file__).parent / "old_bundles"
EXPECTED: list[dict[str, Any]] = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
NAMES = sorted({case["bundle"] for case in EXPECTED})


@pytest.fixture(scope="module", params=NAMES)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    with tarfile.open(HERE / f"{request.param}.tar.xz") as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    with Session.load(folder, check="sha256") as session:
        yield request.param, session


def test_every_draft_gives_the_tokens_of_then(session: tuple[str, Session]) -> None:
    name, loaded = session
    cases = [case for case in EXPECTED if case["bundle"] == name]
    assert {case["draft"] for case in cases} == {
        "none",
        *(draft.name for draft in loaded.bundle.manifest.drafts),
    }
    for case in cases:
        result = loaded.generate(
            HERE / "picture.png", "where is the red cube", draft=case["draft"], **case["options"]
        )
        stats = result.stats
        given = (list(result.tokens), result.text, stats.cycles, stats.proposed, stats.accepted)
        expected = (case["tokens"], case["text"], case["cycles"], case["proposed"], case["accepted"])
        assert given == expected, (case["draft"], case["options"])


def test_cases_are_worth_comparing() -> None:
    """Both bundles write varied text, and some drafts are accepted."""
    for name in NAMES:
        cases = [case for case in EXPECTED if case["bundle"] == name]
        # One text for all drafts when greedy, and one when sampled.
        assert len({tuple(case["tokens"]) for case in cases}) == 2
        assert all(len(set(case["tokens"])) >= 14 for case in cases)
        assert sum(case["accepted"] for case in cases) >= 10
