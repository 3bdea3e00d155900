"""Models and drafts of the tests are the same whatever ran before them: what a test catches must not hang on its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import tiny_models
from tests.support.tiny_bundles import (
    untrained_draft,
    untrained_heads,
    untrained_layer,
    untrained_vispec,
    untrained_wide,
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.relative_to(folder)}:{name}": value
        for path in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


@pytest.mark.parametrize("family", sorted(tiny_models.BUILDERS))
def test_weights_are_the_same_whatever_was_drawn_before(family: str, tmp_path: Path) -> None:
    found = []
    for turn in range(2):
        torch.manual_seed(turn)
        place = tmp_path / str(turn)
        model = tiny_models.checkpoint(family, place / "model")
        untrained_draft(model, 1, place / "imitation")
        untrained_heads(model, place / "medusa")
        untrained_layer(model, place / "eagle")
        untrained_wide(model, place / "eagle3", (1, 1, 1))
        if family == "llava":
            untrained_vispec(model, place / "vispec")
        found.append(weights(place))
    one, two = found
    assert one.keys() == two.keys() and len({name.partition("/")[0] for name in one}) >= 5
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
