"""The table: every row on every engine for every family, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.pairs import each_value
from tests.support.rig import ENGINES, FAMILIES, Rig
from tests.support.rows import ROWS


@each_value(groups=[("family", "engine")], family=FAMILIES, engine=ENGINES, row=ROWS)
def test_contract(rigs: Callable, family: str, engine: str, row: str) -> None:
    made: list[Rig] = []

    def rig_for(name: str) -> Rig:
        made.append(rigs(name, engine))
        return made[-1]

    ROWS[row](rig_for, family)
    for rig in made:
        rig.settle()
