"""The bundled models have really learned to look, and their drafts fit them and are as good as said.

Every alias that comes with the package is tested: a new bundled model is its alias and its folders, and nothing here.
"""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from PIL import Image
from transformers import AutoImageProcessor
from vlmexport.calibration.data import load_records
from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene, score_told, total_accuracy
from vlmexport.calibration.data.scenes.dataset import model_picture
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.exporter.common.aliases import ALIASES, Alias, find_alias
from vlmexport.exporter.drafts.eagle.layer_draft import LayerDraft
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft
from vlmexport.exporter.drafts.selection import select_drafts

from recipes.common.captioner import LONGEST, Captioner
from recipes.common.checks import Checks, described
from recipes.common.drafts import exits, measure_drafts
from recipes.common.evaluation import musts
from recipes.evaluate import imitation_drafts, shipped
from recipes.models import captioner_of, open_captioner
from recipes.tiny_drafts import draft_layers, joined
from tests.support.training_targets import with_answers

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MODELS = [alias.name for alias in ALIASES if alias.bundled]
LEAST = {
    "tiny-blip2-flant5": (0.85, 0.91),
    "tiny-vit-gpt2": (0.88, 0.95),
    "tiny-qwen2.5-vl": (0.92, 0.96),
}
"""Alpha on captions that the drafts of a model are known to reach; of another one, what a test bed needs."""
OF_ALL = {"tiny-qwen2.5-vl": (0.88, 0.93)}
"""The same on all that the model answers, where the drafts are known to reach less of it."""
SOME = 16
FLOOR, CEILING = 0.30, 0.90
"""Of the early exit after a quarter of the layers, and of the draft there: what the test bed asks for."""


@pytest.fixture(scope="module", params=MODELS)
def alias(request: pytest.FixtureRequest) -> Alias:
    found = find_alias(request.param)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(alias: Alias) -> Path:
    assert alias.folder is not None
    return alias.folder


@pytest.fixture(scope="module")
def captioner(folder: Path) -> Captioner:
    return open_captioner(folder)


@pytest.fixture(scope="module")
def checks(captioner: Captioner) -> Checks:
    return Checks(captioner, 0, HELDOUT[:32])


@pytest.fixture(scope="module")
def target(alias: Alias) -> Target:
    return load_target(alias.name)


def heads(alias: Alias) -> list[Path]:
    """Its Medusa heads: one folder."""
    return [f for f in alias.draft_folders() if f.name == "medusa"]


def imitations(alias: Alias) -> list[Path]:
    """Its imitation drafts, a folder a layer."""
    found = alias.draft_folders()
    return [f for f in found if json.loads((f / "draft.json").read_text())["kind"] == "imitation"]


def heldout(folder: Path) -> dict[str, Any]:
    """What a draft reaches on what is held out, as it states it."""
    return json.loads((folder / "draft.json").read_text())["evaluation"]["heldout"]


def on_captions(folder: Path, captioner: Captioner) -> dict[str, Any]:
    """What a draft states of captions alone."""
    stated, form = heldout(folder), captioner.captions_form()
    return stated.get("parts", {form: stated})[form]


def test_the_folder_is_small_and_plain(folder: Path):
    files = {f.name: f.stat().st_size for f in folder.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "recipe.json",
    } <= set(files)
    assert {"processor_config.json", "preprocessor_config.json"} & set(files)
    assert sum(files.values()) <= 15_000_000


def test_bundled_model_reads_pictures_with_calibrated_confidence(captioner: Captioner, checks: Checks):
    """What the evaluation measures on 1,000 scenes, within what 32 can say."""
    found = checks.figures()
    assert found["facts"] >= 0.75
    assert found["facts_of_another_scene"] <= 0.15
    assert found["over_floor"] <= 1.2
    assert 0.25 <= found[f"early_exit_{captioner.early[0]}_alpha"] <= 0.7
    assert not captioner.asks or found["answers"] >= 0.75


def test_grey_picture_gives_no_information(captioner: Captioner):
    grey = Checks(captioner, 0, HELDOUT[:32], grey=True)
    assert total_accuracy(map(score_told, grey.captions()[0], grey.scenes)) <= 0.2


def test_stored_evaluation_meets_every_requirement(alias: Alias, folder: Path, captioner: Captioner):
    found = json.loads((RESULTS / f"{alias.name}-eval.json").read_text())
    assert set(found["musts"]) == set(musts(captioner))
    assert all(must["met"] for must in found["musts"].values()), found["musts"]
    assert found["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_stored_evaluation_knows_the_drafts_that_ship(alias: Alias, captioner: Captioner):
    """By part of the text and by position, and on captions what each draft.json says."""
    found = json.loads((RESULTS / f"{alias.name}-eval.json").read_text())
    folders = imitations(alias)
    assert list(found["drafts"]) == [*exits(captioner), *(f.name for f in folders)]
    for folder in folders:
        told, stated = found["drafts"][folder.name], on_captions(folder, captioner)
        bare = found["drafts"][f"early-exit@{told['layer']}"]
        assert told["fingerprint"] == ImitationDraft.load(folder).fingerprint
        assert told["tokens"] == stated["tokens"]
        assert told["alpha"] == pytest.approx(stated["alpha"], abs=1e-4)
        for by in ("agreement_by_part", "agreement_by_span"):
            assert all(told[by][name] > bare[by][name] for name in bare[by])
        assert told["agreement_by_part"]["fact"] == min(told["agreement_by_part"].values())


def test_a_recipe_and_eval_measure_the_same(
    alias: Alias, folder: Path, captioner: Captioner, checks: Checks, target: Target
):
    """Rows of the captioner and rows of the target, its exits and networks, on the same captions."""
    ids = described(captioner, checks.image_embeds[:SOME], checks.prompt)
    folders = shipped(folder)
    assert folders == imitations(alias)
    drafts = {**exits(captioner), **imitation_drafts(folders, folder, captioner)}
    mine = measure_drafts(captioner, checks.image_embeds[:SOME], checks.prompt, ids, drafts).drafts
    asked = load_records(f"{captioner.captions_form()}:heldout:{SOME}")
    names = {name: name for name in exits(captioner)} | {f.name: str(f) for f in folders}
    theirs = evaluate_drafts(target, with_answers(asked, ids), list(names.values()), max_new_tokens=LONGEST)
    for name, other in names.items():
        a, b = mine[name].acceptance, theirs[other]
        assert (a.tokens, len(a.by_position)) == (b.tokens, len(b.by_position)), name
        assert a.alpha == pytest.approx(b.alpha, abs=0.002), name  # sums of another order, at near-ties
        assert a.overlap == pytest.approx(b.overlap, abs=1e-4), name


def test_training_pictures_equal_the_processors(folder: Path, captioner: Captioner):
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    seen = processor(images=Image.fromarray(render(sample_scene(0, 3))), return_tensors="np")["pixel_values"]
    ours = captioner.pixels(model_picture(0, 3, captioner.side)[None])[0].numpy()
    assert ours.size == seen.size and np.abs(seen.reshape(ours.shape) - ours).max() < 1e-5


def test_every_quarter_and_half_has_a_draft_for_these_weights(alias: Alias, target: Target):
    for layer, folder in zip(draft_layers(target), imitations(alias), strict=True):
        draft = ImitationDraft.load(folder)
        assert (draft.layer, draft.target["name"]) == (layer, alias.name)
        draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
        assert sum(f.stat().st_size for f in folder.iterdir()) < 200_000


def test_heads_fit_these_weights_and_are_what_a_build_takes(alias: Alias, target: Target):
    (folder,) = heads(alias)
    draft = MedusaDraft.load(folder)
    assert draft.target["name"] == alias.name
    draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
    assert sum(f.stat().st_size for f in folder.iterdir()) < 1_500_000
    assert draft.tree is not None and len(draft.tree) == 63
    assert draft.evaluation["heldout"]["alpha"] >= 0.5
    chosen = select_drafts(alias.name, alias, [], None, target.num_layers)
    assert chosen.default is not None and chosen.default.name == "medusa"


def test_layers_fit_these_weights(alias: Alias, target: Target):
    """Of EAGLE and of ViSpec, for a decoder that reads pictures among its rows."""
    names = {"eagle", "vispec"} if alias.name == "tiny-qwen2.5-vl" else set()
    folders = {f.name: f for f in alias.draft_folders() if f.name in ("eagle", "vispec")}
    assert set(folders) == names
    for name, folder in folders.items():
        draft = open_draft(folder)
        assert isinstance(draft, LayerDraft) and draft.kind == name
        draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
        assert sum(f.stat().st_size for f in folder.iterdir()) < 700_000
        assert draft.evaluation["heldout"]["alpha"] >= 0.7


def test_imitation_drafts_leave_room(alias: Alias, captioner: Captioner):
    stated = [m["alpha"] for m in map(heldout, imitations(alias))]
    exits = [m["early_exit"]["alpha"] for m in map(heldout, imitations(alias))]
    assert exits[0] >= FLOOR and exits[0] + 0.15 <= stated[0] <= CEILING
    assert stated[0] + 0.02 <= stated[1]
    captions = [on_captions(folder, captioner)["alpha"] for folder in imitations(alias)]
    for found, least in ((captions, LEAST), (stated, LEAST | OF_ALL)):
        assert all(s >= low for s, low in zip(found, least.get(alias.name, exits), strict=True))


@pytest.mark.slow
def test_drafts_reach_their_stored_figures(alias: Alias, target: Target):
    """What every draft.json states of all that the model answers, and of the bare exits, holds on other requests, within what
    so few can say."""
    folders = alias.draft_folders()
    asked = captioner_of(target.checkpoint.architecture).forms()
    for folder in folders:
        assert heldout(folder)["data"] == " + ".join(f"{form}:heldout:1000" for form in asked)
    stated = {str(folder): heldout(folder)["alpha"] for folder in folders}
    for layer, folder in zip(draft_layers(target), imitations(alias), strict=True):
        stated[f"early-exit@{layer}"] = heldout(folder)["early_exit"]["alpha"]
    others = joined([load_records(f"{form}:heldout:{SOME}:offset=1000") for form in asked])
    found = evaluate_drafts(target, others, list(stated), max_new_tokens=LONGEST)
    for name, alpha in stated.items():
        assert abs(found[name].alpha - alpha) <= 0.05, name
        assert found[name].evaluated > 1000
