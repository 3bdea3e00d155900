"""The drafts in the package fit the model in the package, and are as good as said."""

from __future__ import annotations

import pytest
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.calibration.workshop.recipes.tiny_drafts import LAYERS, MODEL
from vlmexport.exporter.checkpoint.aliases import find_alias
from vlmexport.exporter.drafts.imitation import ImitationDraft


@pytest.fixture(scope="module")
def model() -> Target:
    return load_target(MODEL)


def test_every_quarter_and_half_has_a_draft_for_these_weights(model: Target):
    alias = find_alias(MODEL)
    assert alias is not None
    folders = alias.draft_folders()
    assert (model.num_layers // 4, model.num_layers // 2) == LAYERS
    for layer, folder in zip(LAYERS, folders, strict=True):
        draft = ImitationDraft.load(folder)
        assert draft.layer == layer
        draft.check_target(model.name, model.fingerprint, model.num_layers, model.hidden_size)
        assert sum(f.stat().st_size for f in folder.iterdir()) < 200_000
        assert draft.evaluation["heldout"]["alpha"] >= {3: 0.80, 6: 0.88}[layer]


def test_acceptance_on_heldout_scenes(model: Target):
    """The figure that draft.json states holds on a fresh sample, within what 24 captions can say."""
    alias = find_alias(MODEL)
    assert alias is not None
    records = load_records("scenes:heldout:1024")[-24:]
    results = evaluate_drafts(model, RecordSet("some", records), [str(f) for f in alias.draft_folders()])
    for result, least in zip(results.values(), (0.76, 0.84), strict=True):
        assert result.alpha >= least
        assert result.evaluated > 1000
