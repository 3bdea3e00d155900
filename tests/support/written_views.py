"""Pictures of a family that writes one run of embeddings, as several runs with text between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vlmexport.runtime.families.base import View


def written_in_spans(patch: pytest.MonkeyPatch, family: type[Any]) -> None:
    """Every picture that `family` reads has words before, within and behind it, the first and the last embedding apart."""
    view = family.view

    def several(self: Any, bundle: Any, image: Any) -> View:
        read = view(self, bundle, image)
        return replace(read, written=("a ", 1, " red", read.num_embeds - 2, " cup\n", 1, "\n\n"))

    patch.setattr(family, "view", several)
