"""The recipe of `tiny-vit-gpt2` at a size that trains in seconds."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from PIL import Image
from vlmexport.calibration.data.scenes import HELDOUT, TRAIN, render, sample_scene, tell
from vlmexport.calibration.data.scenes.dataset import model_picture
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.drafts.early_exit import EarlyExit
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.families.registry import family_for
from vlmexport.runtime.common.errors import OptionError

from recipes import tiny_drafts
from recipes.common.batches import Batches
from recipes.common.captioner import IGNORED, cross_entropy, padded
from recipes.common.drafts import measure_drafts
from recipes.models import CAPTIONERS, captioner_of
from recipes.tiny_blip2_flant5.captioner import Blip2T5
from recipes.tiny_vit_gpt2 import __main__ as recipe
from recipes.tiny_vit_gpt2.captioner import ViTGPT2
from recipes.tiny_vit_gpt2.model import SIDE, build_model, save_bundle
from recipes.tiny_vit_gpt2.tokenizer import END, build_tokenizer
from recipes.tiny_vit_gpt2.tower import take_tower
from recipes.tiny_vit_gpt2.train import train

TOWER = Path(__file__).parents[2] / "models" / "vlmexport_tiny_models" / "tiny-blip2-flant5"
SMALL = {"pictures": 12, "captions": 3, "precision": "fp32", "checked": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def captioner(tokenizer):
    model = build_model(tokenizer).eval()
    take_tower(model, TOWER)
    return ViTGPT2(model, tokenizer)


@pytest.fixture(scope="module")
def folder(captioner, tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("recipe") / "model"
    save_bundle(captioner.model, tokenizer, place, 160)
    return place


def test_every_word_of_a_caption_is_one_token(tokenizer):
    for index in (*TRAIN[:150], *HELDOUT[:150]):
        text = tell(sample_scene(0, index)).text
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(re.findall(r"\w+|[^\w\s]", text)), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.unk_token_id not in ids
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (END, END, END)
    assert tokenizer.convert_tokens_to_ids(END) == len(tokenizer) - 1


def test_the_tower_gives_the_rows_of_the_model_it_was_taken_from(captioner, folder):
    """Through each model's own processor: the other normalisation is folded into the patch embedding."""
    old = Blip2T5.open(TOWER).model
    picture = Image.fromarray(render(sample_scene(0, HELDOUT[3])))
    seen = []
    for place, tower in ((TOWER, old.vision_model), (folder, captioner.model.encoder)):
        processor = transformers.AutoImageProcessor.from_pretrained(place, backend="pil")
        with torch.no_grad():
            seen.append(tower(**processor(images=picture, return_tensors="pt")).last_hidden_state)
    assert seen[0].std() > 0.5
    assert (seen[0] - seen[1]).abs().max() < 5e-5
    ours = captioner.rows(model_picture(0, HELDOUT[3], SIDE)[None])
    assert (ours - seen[1]).abs().max() < 5e-5
    assert tuple(ours.shape[1:]) == captioner.shape


def test_end_token_is_learned_and_padding_is_not(captioner):
    """One token starts, ends and pads: only the one behind a text may be learned."""
    batch = Batches(captioner, 0, TRAIN[:40], 6).told(0)
    lengths = (batch.targets != IGNORED).sum(1)
    for row, length in zip(batch.targets.tolist(), lengths.tolist(), strict=True):
        assert row[length - 1] == captioner.end
        assert captioner.end not in row[: length - 1]
        assert set(row[length:]) <= {IGNORED}
    assert len(set(lengths.tolist())) > 1
    rows = torch.randn(6, *captioner.shape)
    with torch.no_grad():
        found = captioner.logits(rows, batch.prompts, batch.targets)
        own = captioner.model(
            encoder_outputs=(rows,), labels=batch.targets
        )  # transformers' own shift and loss
    assert torch.allclose(found, own.logits, atol=1e-5)
    assert torch.allclose(cross_entropy(found, batch.targets), own.loss, atol=1e-5)


def test_an_early_exit_may_propose_the_end_of_a_text(captioner):
    """As the runtime counts: all of a text that ends, and of one that was cut all but its last token."""
    words = captioner.text_ids([tell(sample_scene(0, 5)).text])[0]
    for last, proposed in ((captioner.end, 3), (words[3], 2)):
        text = [[*words[:3], last]]
        rows, whole = torch.randn(1, *captioner.shape), {"whole": EarlyExit(12)}
        found = measure_drafts(captioner, rows, [], text, whole).drafts["whole"].acceptance
        assert (found.proposed, found.accepted, found.tokens) == (proposed, proposed, 3)


def test_rows_lead_to_what_the_picture_leads_to(folder):
    """Logits from our rows are those of the model on the processor's pixels, and so is greedy text."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    stored = ViTGPT2.open(folder)
    text = torch.tensor([stored.text_ids([tell(sample_scene(0, 5)).text])[0]])
    found = []
    for index in (5, 6):
        batch = processor(images=Image.fromarray(render(sample_scene(0, index))), return_tensors="pt")
        rows = stored.rows(model_picture(0, index, SIDE)[None])
        with torch.no_grad():
            found.append(stored.logits(rows, padded([[]]), text))
            assert torch.allclose(stored.model(**batch, labels=text).logits, found[-1], atol=1e-4)
        direct = stored.model.generate(**batch, max_new_tokens=12)[0, 1:].tolist()
        assert direct == stored.speak(rows, padded([[]]), 12)[0]
    assert not torch.allclose(*found, atol=1e-2)


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path):
    assert train(tmp_path / "one", 6, TOWER, **SMALL) == 6
    assert train(tmp_path / "two", 6, TOWER, stop_at=3, **SMALL) == 3
    assert train(tmp_path / "two", 6, TOWER, **SMALL) == 6
    one, two = (torch.load(tmp_path / n / "state.pt", weights_only=True) for n in ("one", "two"))
    assert one["step"] == two["step"] == 6
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    assert not any(name.startswith("encoder.") for name in one["model"])
    lines = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert {"facts", "perplexity", "floor", "early_exit_3_alpha"} <= set(lines[-1])
    assert "answers" not in lines[-1]
    with pytest.raises(OptionError, match=r"trained with lr 0\.003, not 0\.001"):
        train(tmp_path / "two", 6, TOWER, lr=1e-3, **SMALL)


def test_a_few_steps_lower_the_loss(tmp_path):
    train(tmp_path, 16, TOWER, **(SMALL | {"captions": 4}))
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert first["caption"] < 6.0  # a fresh one has log(348) = 5.85 and more


def test_the_folder_is_one_of_the_family(folder, captioner):
    checkpoint = open_checkpoint(str(folder))
    family = family_for(checkpoint)
    assert family.name == "vit-gpt2" and family.max_positions == 512
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert sum(p.stat().st_size for p in folder.iterdir()) < 15_000_000
    config = json.loads((folder / "config.json").read_text())
    end = captioner.end
    assert [config[n] for n in ("decoder_start_token_id", "eos_token_id", "pad_token_id")] == [end] * 3
    loaded = ViTGPT2.open(folder).model.state_dict()
    assert all(torch.equal(v.half().float(), loaded[n]) for n, v in captioner.model.state_dict().items())


def test_architectures_have_their_recipes():
    assert captioner_of("VisionEncoderDecoderModel") is ViTGPT2
    assert all(kind.model_class.__name__ == name for name, kind in CAPTIONERS.items())
    with pytest.raises(OptionError, match="no recipe makes a GPT2LMHeadModel"):
        captioner_of("GPT2LMHeadModel")


@pytest.mark.slow
def test_drafts_of_a_captioner_learn_from_captions_only(folder, tmp_path, monkeypatch):
    """A prompt would be the beginning of a caption, so there is none, and there are no questions."""
    monkeypatch.setattr(tiny_drafts, "GenerationOptions", lambda longest: GenerationOptions(12))
    monkeypatch.setattr(tiny_drafts, "LONGEST", 12)
    monkeypatch.setenv("VLMEXPORT_CACHE", str(tmp_path / "cache"))
    for forms in (["films"], ["scenes-captions", "scenes-questions"]):
        with pytest.raises(OptionError, match="needs scenes-captions, and answers scenes-captions"):
            tiny_drafts.prepare(str(folder), tmp_path / "work", forms=forms)
    workshop = tiny_drafts.prepare(str(folder), tmp_path / "work", captions=4, heldout=2)
    assert sorted(workshop.features) == [3, 6]
    shards = sorted((tmp_path / "work").rglob("shard-*.jsonl"))
    told = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
    assert {line["prompt"] for line in told} == {""}
    assert len(told) == 4 + 4 + 2
    made = tiny_drafts.make_imitation(workshop, tmp_path / "work", tmp_path / "drafts", 2)
    made += tiny_drafts.make_heads(workshop, tmp_path / "work", tmp_path / "drafts", 2)
    assert [place.name for place in made] == ["n3", "n6", "medusa"]
    told = tiny_drafts.measure(workshop, made)
    stored = json.loads((tmp_path / "drafts" / "n3" / "draft.json").read_text())["evaluation"]["heldout"]
    assert stored == told["n3"] and stored["data"] == "scenes-captions:heldout:2" and "parts" not in stored
    assert np.isfinite(stored["alpha"])
    heads = open_draft(tmp_path / "drafts" / "medusa")
    assert heads.name == "medusa" and len(heads.evaluation["hits"]) == 4 and "heldout" in heads.evaluation


@pytest.mark.slow
def test_one_command_makes_a_model_with_its_record_and_evaluation(tmp_path, monkeypatch):
    words = ["--pictures", 12, "--steps", 2, "--captions", 2, "--scenes", 4, "--threads", 1]
    monkeypatch.setattr(
        "sys.argv", ["recipe", "--out", str(tmp_path), "--precision", "fp32", *map(str, words)]
    )
    recipe.main()
    record = json.loads((tmp_path / "model" / "recipe.json").read_text())
    assert record["command"].endswith("tiny_vit_gpt2") and record["curve"][-1]["step"] == 2
    assert "vision_curve" not in record and record["settings"]["tower"] == "tiny-blip2-flant5"
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["scenes"] == 4 and not found["musts"]["facts"]["met"] and "answers" not in found["musts"]
