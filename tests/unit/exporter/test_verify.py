"""`verify` compares a bundle with the drafts that it was built from, and with no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vlmexport.exporter.parity.verify import VerifySettings, verify_bundle
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.bundle.folder import Bundle

from tests.support.tiny_bundles import untrained_draft

SHORT = VerifySettings(prompts=1, max_new_tokens=4)


def test_drafts_are_matched_by_their_weights(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = str(tiny_checkpoint("llama"))
    own, other = (untrained_draft(Path(model), 1, tmp_path / f"draft-{seed}", seed) for seed in (1, 2))
    folder = tmp_path / "bundle"
    build_bundle(BuildRequest(model=model, output=folder, drafts=[str(own)], parity=False))
    fingerprints = {d.kind: d.fingerprint for d in Bundle.open(folder).manifest.drafts}
    assert fingerprints["early-exit"] is None and str(fingerprints["imitation"]).startswith("sha256:")

    found = verify_bundle(folder, model, [own], SHORT)
    assert found.ok and "imitation.1" in {row["graph"] for row in found.parity}
    found = verify_bundle(folder, model, (), SHORT)
    assert found.ok and found.notes == ["imitation.1 was not compared: give its draft's folder with --draft"]
    found = verify_bundle(folder, model, [other], SHORT)
    assert (
        len(found.failures) == 1
        and "the bundle holds no draft of these weights (imitation@1, sha256:" in found.failures[0]
    )
