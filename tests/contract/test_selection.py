"""What is left in every run: each family × draft × engine has a row (with the network with attention, which is in a bundle of
its own, few families and each engine), and each planted error a guard that it must fail.

Families whose decoder is another's have their rows on ONNX Runtime (`every_run.ALIKE`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract import test_contract, test_lossless, test_mutants
from tests.support import every_run, lossless
from tests.support.rig import ENGINES, FAMILIES
from tests.support.rows import ROWS


def cases_of_every_run(test: Callable[..., Any]) -> set[tuple[Any, ...]]:
    """Values of the cases of a parametrized test that are not slow."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    names, cases = mark.args[:2]
    found = {tuple(getattr(case, "values", case)) for case in cases if not getattr(case, "marks", ())}
    file = f"contract/{Path(test.__code__.co_filename).name}"
    return {case for case in found if not every_run.is_anothers(file, dict(zip(names, case, strict=True)))}


def in_every_run(family: str, engine: str) -> bool:
    """Whether a family has rows on an engine there."""
    return not every_run.is_anothers("contract/test_lossless.py", {"family": family, "engine": engine})


def test_every_family_draft_and_engine_has_a_row() -> None:
    rows = {
        (family, engine, name)
        for family, engine, draft in cases_of_every_run(test_lossless.test_every_draft_on_every_engine)
        for name in (lossless.drafts_of(family, engine) if draft in lossless.MIXED else [draft])
    }
    combinations = {
        (family, engine, draft)
        for family, engine, draft in itertools.product(FAMILIES, ENGINES, lossless.DRAFTS)
        if test_lossless.there({"family": family, "engine": engine, "draft": draft})
        and in_every_run(family, engine)
    }
    missing = {each for each in combinations - rows if "attending" not in each[-1]}
    assert not missing, sorted(missing)
    attending = {each[:2] for each in rows if "attending" in each[-1]}
    assert {engine for _, engine in attending} == set(ENGINES)
    assert {family for family, _ in attending} == set(test_lossless.ATTENDING)


def test_every_row_of_the_table_runs_and_every_family_on_every_engine() -> None:
    cases = cases_of_every_run(test_contract.test_contract)
    assert {row for *_, row in cases} == set(ROWS)
    wanted = {each for each in itertools.product(FAMILIES, ENGINES) if in_every_run(*each)}
    assert {(family, engine) for family, engine, _ in cases} == wanted


def test_every_mutant_is_killed_by_a_guard_that_runs_without_it() -> None:
    cases = cases_of_every_run(test_mutants.test_mutant_is_killed)
    assert {mutant for mutant, *_ in cases} == set(test_mutants.MUTANTS)
    guards = {(family, guard) for _, family, guard in cases}
    assert guards <= cases_of_every_run(test_mutants.test_guards_pass_without_a_mutant)


@pytest.mark.parametrize("name", every_run.KEPT)
def test_costly_tests_that_are_cut_exist(name: str) -> None:
    file, _, test = name.partition("::")
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    assert not test or f"def {test}(" in text
