"""Every published layout of a draft, built with its published target: its proposals change no token, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.prepare import prepare
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import VlmexportError

from tests.integration.published.test_published import TOKENS, requests
from tests.support.own_generation import difference
from tests.support.published import drafts
from tests.support.published.answers import Transformers
from tests.support.published.folders import write
from tests.support.published.layouts import Layout, layouts, read

Targets = Callable[[str], tuple[Path, Transformers | None]]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """By the name of a layout its folder, `converted`, and what transformers makes of it where vlmexport takes it."""
    made: dict[str, tuple[Path, Transformers | None]] = {}

    def target(name: str) -> tuple[Path, Transformers | None]:
        if name not in made:
            layout = read(name).converted
            folder = write(layout, tmp_path_factory.mktemp("target") / "model")
            made[name] = folder, None if layout.refused else Transformers(folder)
        return made[name]

    return target


def _cases() -> list[object]:
    return [
        pytest.param(layout, id=layout.name, marks=pytest.mark.slow if layout.slow else ())
        for layout in layouts()
        if layout.draft is not None
    ]


@pytest.mark.parametrize("layout", _cases())
def test_a_published_draft_changes_no_token_or_is_refused(
    layout: Layout, tmp_path: Path, targets: Targets
) -> None:
    assert layout.target is not None
    model, own = targets(layout.target)
    rows = 600 if own is None else own.model.get_output_embeddings().weight.shape[0]
    folder = drafts.write(layout, tmp_path / "draft", rows)
    request = BuildRequest(
        model=str(model), output=tmp_path / "bundle", drafts=[str(folder)], precision="float32"
    )
    if layout.refused is not None:
        with pytest.raises(VlmexportError) as raised:
            prepare(request, write=False)
        assert layout.refused in str(raised.value)
        assert "\n" not in str(raised.value)
        return
    assert own is not None, "a draft cannot be accepted where its target is not"
    report = build_bundle(request)
    assert layout.draft in {row["graph"] for row in report.parity}
    proposed = 0
    with Session.load(tmp_path / "bundle") as session, torch.no_grad():
        known = next(draft for draft in session.bundle.manifest.drafts if draft.kind == layout.draft)
        axes = "mrope_section" in (layout.json("config.json").get("rope_scaling") or {})
        assert known.to_dict().get("position") == ("mrope" if axes and layout.draft != "vispec" else None)
        for asked in requests(own)[: 3 if axes else 2]:  # the third has a picture
            given = {
                "images": list(asked.pictures) or None,
                "prompt": asked.prompt or None,
                "max_new_tokens": TOKENS,
            }
            found = session.generate(**given, draft=layout.draft, draft_length=3)
            assert found.tokens == session.generate(**given, draft="none").tokens
            assert difference(own.model, own.inputs(asked), found.tokens, TOKENS) is None, asked.prompt
            proposed += found.stats.proposed
    assert proposed > 0
