"""A session whose bundle is replaced on the disk: it serves what it loaded, and never mixes two bundles."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import BundleError

FRAME = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)


@pytest.fixture
def bundle(tiny_bundle: Callable, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle("t5").path, tmp_path / "bundle"))


def replace(bundle: Path, names: list[str]) -> None:
    """As a deployment does: another folder, in which these files hold other bytes."""
    old = bundle.rename(bundle.with_name(bundle.name + ".old"))
    shutil.copytree(old, bundle)
    for name in names:
        content = (bundle / name).read_bytes()
        (bundle / name).write_bytes(content[::-1])


def tokens(session: Session, **options: object) -> list[int]:
    return list(session.generate(image=FRAME, prompt="a red cup", max_new_tokens=8, **options).tokens)


def test_default_request_uses_the_loaded_bundle(bundle: Path) -> None:
    with Session.load(bundle) as session:
        expected = tokens(session)
    session = Session.load(bundle)
    replace(bundle, [path.name for path in bundle.iterdir() if path.is_file()])
    assert tokens(session) == expected
    session.close()


@pytest.mark.parametrize("changed", ["weights.bin", "its graph", "nothing"])
def test_late_loaded_draft_is_of_the_same_bundle(bundle: Path, changed: str) -> None:
    session = Session.load(bundle)
    manifest, loaded = session.bundle.manifest, session.decoder.engine._sessions
    late = next(
        draft for draft in manifest.drafts if draft.graphs and not set(draft.graphs.values()) & set(loaded)
    )
    graph = manifest.graphs[next(iter(late.graphs.values()))].file
    plain = tokens(session, draft="none")
    replace(bundle, {"weights.bin": ["weights.bin"], "its graph": [graph], "nothing": []}[changed])
    if changed == "nothing":
        assert tokens(session, draft=late.name) == plain
    else:
        with pytest.raises(
            BundleError, match="was replaced since the bundle was opened; load the session again"
        ):
            tokens(session, draft=late.name)
        assert tokens(session, draft="none") == plain
    session.close()
