"""`verify --certificate`: what is counted, what the manifest keeps of it, and what of it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import vlmexport.runtime
from vlmexport.exporter.parity.certificate import certificate_failures, certify, ways_to_draft
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.certificate import Certificate, Difference
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest_changes import store_certificate
from vlmexport.runtime.bundle.target_weights import TargetWeights
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.decoder.logits import TargetLogits
from vlmexport.runtime.measure.inspection import facts

from tests.support.tiny_bundles import TinyBundle

EQUAL = Certificate(
    engine="onnxruntime-cpu", version="1.31.1", machine="board", threads=2, date="2026-11-28T10:00:00Z", requests=3, ways=9,
    tokens=1234,
)  # fmt: skip
FIRST = Difference(draft="medusa", draft_length=3, draft_nodes=7, request=1, token=24, margin=0.0016)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[[str], TinyBundle]) -> Bundle:
    return tiny_bundle("llama-two-cuts").bundle


def integers(bundle: Bundle) -> Bundle:
    """The bundle as one of integer weights."""
    other = copy(bundle)
    other.manifest = replace(bundle.manifest, target_weights=TargetWeights(dtype="int8", block=32))
    return other


def test_every_draft_is_tried_in_every_size(bundle: Bundle) -> None:
    manifest = bundle.manifest
    ways = list(ways_to_draft(manifest, manifest.drafts))
    assert len(ways) == len(set(ways))
    for draft in manifest.drafts:
        longest = draft.options.most_tokens or 19
        lengths = {
            way.length for way in ways if way.name == draft.name and way.nodes is None and not way.wrong
        }
        assert lengths == {min(length, longest) for length in (1, 2, 3, 5, 8, 19)}, draft.name
        assert any(way.nodes == 19 for way in ways if way.name == draft.name) == draft.options.offers_trees
    wrong = {way.name for way in ways if way.wrong}
    assert {manifest.draft(name).layer is None for name in wrong} == {True, False}  # type: ignore[union-attr]
    chains = list(ways_to_draft(integers(bundle).manifest, manifest.drafts))
    assert chains == [way for way in ways if way.nodes is None]


def test_all_equal(bundle: Bundle) -> None:
    small = copy(bundle)
    small.manifest = replace(bundle.manifest, drafts=bundle.manifest.drafts[:2])
    calls: list[tuple[int, int]] = []
    found = certify(integers(small), 2, 6, progress=lambda what, done, total: calls.append((done, total)))
    assert found is not None and found.first is None and found.different == 0
    ways = len(list(ways_to_draft(integers(small).manifest, small.manifest.drafts)))
    assert (found.requests, found.ways) == (2, ways) and found.tokens >= 2 * ways
    assert calls[-1] == (2 * (1 + ways),) * 2
    assert found.engine == "onnxruntime-cpu" and found.version and found.machine and found.date
    assert certificate_failures(found, integers(small).manifest) == []


def test_a_difference_is_found(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that names another token where it judges more than three: every wider cycle differs."""
    best = TargetLogits.best

    def wrong(self: TargetLogits, logits_index: int) -> int:
        token = best(self, logits_index)
        return (token + 1) % 90 if self._logits.shape[0] > 3 else token

    monkeypatch.setattr(TargetLogits, "best", wrong)
    small = copy(bundle)
    small.manifest = replace(
        bundle.manifest, drafts=[d for d in bundle.manifest.drafts if d.kind == "early-exit"]
    )
    found = certify(small, 1, 8)
    assert found is not None and found.first is not None
    assert (found.first.draft_length, found.first.request) == (3, 0) and found.different > 0
    assert found.first.margin is not None and found.largest_margin is not None
    assert "differ from plain decoding, first with early-exit" in found.sentence()
    assert len(certificate_failures(found, small.manifest)) == 1


def test_a_bundle_without_a_draft_has_none(bundle: Bundle) -> None:
    none = copy(bundle)
    none.manifest = replace(bundle.manifest, drafts=[])
    assert certify(none, 1, 2) is None


def test_what_fails(bundle: Bundle) -> None:
    near = replace(EQUAL, different=1, first=replace(FIRST, margin=2e-6), largest_margin=2e-6)
    far = replace(EQUAL, different=2, first=replace(FIRST, margin=2e-6), largest_margin=0.25)
    ends = replace(EQUAL, different=1, first=replace(FIRST, margin=None))
    assert certificate_failures(EQUAL, bundle.manifest) == certificate_failures(near, bundle.manifest) == []
    for certificate in (far, ends):
        assert len(certificate_failures(certificate, bundle.manifest)) == 1
    assert len(certificate_failures(near, integers(bundle).manifest)) == 1, "no near-tie is honest there"


def test_the_manifest_keeps_it(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle.path, folder)
    other = replace(EQUAL, machine="another", different=1, first=FIRST, largest_margin=0.0016)
    for certificate in (EQUAL, other, replace(EQUAL, tokens=5)):
        store_certificate(folder, certificate)
    again = Bundle.open(folder, check="sha256")
    kept = [Certificate.parse(entry, "certificates") for entry in again.manifest.certificates]
    assert kept == [other, replace(EQUAL, tokens=5)], "one of the same engine and machine is replaced"
    schemas = Path(vlmexport.runtime.__file__).parent / "schemas"
    for name, document in (
        ("manifest-2", again.manifest.to_dict()),
        ("inspect-1", facts(again) | {"checked": {"sizes": 1, "sha256": None}}),
    ):
        jsonschema.validate(document, json.loads((schemas / f"{name}.json").read_text("utf-8")))
    assert main(["inspect", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 requests × 9 ways of drafting, 5 tokens, all equal to plain decoding" in shown
    assert "first with medusa (3 deep, trees of 7) at token 24 of request 1" in shown
    document = json.loads((folder / "manifest.json").read_text())
    document["certificates"][0]["threads"] = 0
    document["sha256"] = None
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(BundleError, match=r"certificates\[0\]\.threads': 0"):
        Bundle.open(folder)


def test_the_session_stays_as_it_was(bundle: Bundle) -> None:
    """The probe of a bundle of integers leaves nothing in the cache."""
    with Session.load(integers(bundle)) as session:
        assert session.decoder.arena.length == 0
        key = session.decoder.engine.read(session.decoder.arena.view(0)[0])
        assert np.isfinite(key).all()
