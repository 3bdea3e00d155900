"""The bundled ``tiny-blip2-flant5`` is of the classes that it says. What it has learned: `test_bundled_models.py`."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from PIL import Image
from vlmexport.calibration.data.scenes import (
    DESCRIBE,
    HELDOUT,
    ask,
    render,
    sample_scene,
)
from vlmexport.calibration.data.scenes.dataset import model_picture

from recipes.common.captioner import padded
from recipes.tiny_blip2_flant5.captioner import Blip2T5
from recipes.tiny_blip2_flant5.model import (
    SIDE,
    build_model,
    build_processor,
    save_bundle,
)
from recipes.tiny_blip2_flant5.tokenizer import build_tokenizer

FOLDER = Path(__file__).parents[2] / "models" / "vlmexport_tiny_models" / "tiny-blip2-flant5"


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


def test_processor_and_generate_agree_with_the_evaluation(model, processor):
    captioner = Blip2T5(model, processor.tokenizer)
    rows = captioner.rows(model_picture(0, HELDOUT[5], SIDE)[None])
    scene = sample_scene(0, HELDOUT[5])
    question = ask(scene).text
    batch = processor(images=Image.fromarray(render(scene)), text=question, return_tensors="pt")
    direct = model.generate(**batch, max_new_tokens=12)[0, 1:].tolist()
    ours = captioner.speak(rows, padded([captioner.prompt_ids(question)]), 12)[0]
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
