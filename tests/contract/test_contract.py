"""The table: every row on every engine for every family, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import ENGINES, FAMILIES
from rows import ROWS


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_contract(rigs: Callable, family: str, engine: str, row: str) -> None:
    ROWS[row](lambda name: rigs(name, engine), family)
