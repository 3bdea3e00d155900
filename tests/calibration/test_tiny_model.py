"""The bundled ``tiny-blip2-flant5`` has really learned to look."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import vlmexport.exporter
from PIL import Image
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.batches import padded
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.checks import Checks
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.evaluate import MUSTS
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.language import speak
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.model import (
    SIDE,
    build_model,
    build_processor,
    save_bundle,
)
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.tokenizer import build_tokenizer
from vlmexport.calibration.workshop.scenes import (
    DESCRIBE,
    HELDOUT,
    ask,
    render,
    sample_scene,
    score_told,
    total_accuracy,
)
from vlmexport.calibration.workshop.scenes.dataset import model_picture

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FOLDER = Path(vlmexport.exporter.__path__[0]) / "bundled" / "tiny-blip2-flant5"


@pytest.fixture(scope="module")
def model():
    return transformers.Blip2ForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor():
    return transformers.Blip2Processor.from_pretrained(FOLDER)


def test_folder_is_small_and_plain():
    files = {f.name: f.stat().st_size for f in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "processor_config.json"} <= set(files)
    assert sum(files.values()) <= 9_000_000


def test_architecture(model):
    assert model.config.text_config.num_decoder_layers >= 12
    assert model.config.text_config.is_gated_act
    language = model.language_model
    assert language.lm_head.weight.data_ptr() != language.shared.weight.data_ptr()
    assert not model.config.text_config.scale_decoder_outputs


def test_processor_lays_out_the_prompt(model, processor):
    batch = processor(images=Image.fromarray(render(sample_scene(0, 1))), text=DESCRIBE, return_tensors="pt")
    count = model.config.num_query_tokens
    assert batch["input_ids"][0, :count].eq(model.config.image_token_index).all()
    assert batch["input_ids"][0, -1] == 1
    assert batch["pixel_values"].shape == (1, 3, SIDE, SIDE)
    assert processor.tokenizer.unk_token_id not in batch["input_ids"]


def test_training_pictures_equal_the_processors(processor):
    picture = Image.fromarray(render(sample_scene(0, 3)))
    seen = processor(images=picture, return_tensors="np")["pixel_values"][0]
    mean, std = (np.array(getattr(processor.image_processor, n)) for n in ("image_mean", "image_std"))
    ours = (model_picture(0, 3, SIDE) / 255 - mean) / std
    assert np.abs(seen.transpose(1, 2, 0) - ours).max() < 1e-5


@pytest.fixture(scope="module")
def checks(model, processor):
    return Checks(model, processor.tokenizer, 0, HELDOUT[:32])


def test_it_sees_and_is_not_too_sure(model, checks):
    """What `evaluate` measures on 1,000 scenes, within what 32 can say."""
    found = checks.figures(model)
    assert found["facts"] >= 0.75
    assert found["facts_of_another_scene"] <= 0.15
    assert found["answers"] >= 0.75
    assert found["over_floor"] <= 1.2
    assert 0.25 <= found["early_exit_3_alpha"] <= 0.7


def test_the_stored_evaluation_is_of_this_file_and_meets_every_must():
    found = json.loads((RESULTS / "tiny-blip2-flant5-eval.json").read_text())
    assert set(found["musts"]) == set(MUSTS)
    assert all(must["met"] for must in found["musts"].values()), found["musts"]
    assert found["sha256"] == hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()


def test_a_grey_picture_tells_nothing(model, processor):
    grey = Checks(model, processor.tokenizer, 0, HELDOUT[:32], grey=True)
    texts, _ = grey.captions(model)
    assert total_accuracy(map(score_told, texts, grey.scenes)) <= 0.2


def test_processor_and_generate_agree_with_the_evaluation(model, processor, checks):
    scene = sample_scene(0, HELDOUT[5])
    question = ask(scene).text
    batch = processor(images=Image.fromarray(render(scene)), text=question, return_tensors="pt")
    direct = model.generate(**batch, max_new_tokens=12)[0, 1:].tolist()
    ours = speak(model, checks.rows[5:6], padded(processor.tokenizer([question])["input_ids"]), 12)[0]
    assert direct[: len(ours)] == ours


def test_recipe_writes_a_loadable_folder(tmp_path):
    tokenizer = build_tokenizer()
    fresh = build_model(tokenizer)
    save_bundle(fresh, tokenizer, tmp_path / "model")
    loaded = transformers.Blip2ForConditionalGeneration.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    for (name, a), b in zip(fresh.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a.half().float(), b), name
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "blip-2"
    assert len(build_processor(tokenizer).tokenizer) == loaded.config.text_config.vocab_size
