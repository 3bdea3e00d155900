"""The recipe of `smollm2-llava` at a size that trains in seconds, around a tiny random Llama with a byte-level BPE."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import masking_utils
from vlmexport.calibration.data.scenes import HELDOUT, TRAIN, render, sample_scene, tell
from vlmexport.calibration.data.scenes.dataset import model_picture
from vlmexport.calibration.data.scenes.parts import parts_of
from vlmexport.calibration.data.scenes.vocabulary import KINDS
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import OptionError

from recipes.common.batches import Batches
from recipes.common.captioner import cross_entropy, padded
from recipes.common.drafts import token_parts
from recipes.common.evaluation import musts
from recipes.common.labels import NONE, PATCH_CLASSES, label_table, patch_loss, patch_truth, scene_labels
from recipes.common.loop import learning
from recipes.common.optimizer import OPTIMIZERS
from recipes.common.rows import image_rows
from recipes.models import captioner_of
from recipes.smollm2_llava import __main__ as recipe
from recipes.smollm2_llava import projector as projecting
from recipes.smollm2_llava import vision_stage
from recipes.smollm2_llava.captioner import SmolLlava, encode, encode_all
from recipes.smollm2_llava.model import (
    ROWS,
    SIDE,
    WIDTH,
    build_model,
    frozen,
    save_bundle,
)
from recipes.smollm2_llava.projector import fit_projector, word_rows
from recipes.smollm2_llava.slots import ABOUT_OBJECTS, BLANK, WORDS, said
from recipes.smollm2_llava.tokenizer import IMAGE, TEMPLATE, build_tokenizer
from recipes.smollm2_llava.train import train
from recipes.smollm2_llava.vision_stage import (
    GRID,
    PROJECTOR,
    take_vision,
    train_vision,
)

SMALL = {"tuned": 2, "pictures": 6, "captions": 2, "questions": 2, "precision": "fp32", "checked": 2}
SEEN = {"size": 4, "batch": 2, "precision": "fp32", "checked": 3}


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    """A folder as SmolLM2's, with 4 layers of width 64 and a vocabulary of 400, in which many words are several tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([tell(sample_scene(0, i)).text for i in TRAIN[:60]], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=marks[1], eos_token=marks[2], pad_token=marks[2]
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("language")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def captioner(language) -> SmolLlava:
    tokenizer = build_tokenizer(language)
    return SmolLlava(build_model(language, tokenizer, 0).eval(), tokenizer)


@pytest.fixture(scope="module")
def folder(captioner, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("recipe") / "model"
    save_bundle(captioner.model, captioner.tokenizer, place, 160)
    return place


@pytest.fixture
def brief(monkeypatch):
    """A model that knows nothing never ends: its answers are cut at six tokens."""
    real = SmolLlava.generate
    monkeypatch.setattr(
        SmolLlava, "generate", lambda self, rows, prompts, longest: real(self, rows, prompts, min(longest, 6))
    )


def pictures(count: int) -> np.ndarray:
    return np.stack([model_picture(0, i, SIDE) for i in TRAIN[:count]])


def test_every_row_says_one_word_of_the_scene(tmp_path):
    scenes = [sample_scene(0, i) for i in TRAIN[:20]]
    told = said(label_table(tmp_path / "labels.npz", 0, TRAIN[:20]), ROWS)
    assert told.shape == (40, ROWS)  # the mirrored pictures, too
    for scene, row in zip(scenes, told, strict=False):
        words = [WORDS[number] for number in row]
        for place, item in enumerate(scene.objects):
            own = words[place * len(ABOUT_OBJECTS) : (place + 1) * len(ABOUT_OBJECTS)]
            assert own[:4] == [item.size, item.pattern, item.colour, item.kind]
            assert own[4] == (scene.relations[place - 1].gap if place else BLANK)
            assert own[5] == ("back", "middle", "front")[item.lane]
        nobody = words[len(scene.objects) * len(ABOUT_OBJECTS) : 5 * len(ABOUT_OBJECTS)]
        assert set(nobody) <= {BLANK}
        count = ("zero", "one", "two", "three", "four", "five")[len(scene.objects)]
        assert words[30:] == [scene.table, scene.wall, scene.light, count, BLANK, BLANK]
    mirrored = [WORDS[number] for number in told[20]]
    assert mirrored[3] == scenes[0].objects[-1].kind and mirrored[32] != scenes[0].light
    assert len(set(WORDS)) == len(WORDS) and "owner" in scene_labels(scenes[0])


def test_the_targets_of_the_projector_are_the_words_of_the_language_model(captioner):
    table = captioner.model.model.language_model.embed_tokens.weight
    found = word_rows(captioner.model, captioner.tokenizer)
    assert found.shape == (len(WORDS), 64)
    for word in ("red", "wooden"):
        ids = captioner.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
        assert torch.allclose(found[WORDS.index(word)], table[ids].mean(0))


def test_the_language_model_is_as_it_was_but_for_the_mark(captioner, language):
    plain = transformers.LlamaForCausalLM.from_pretrained(language, dtype=torch.float32).eval()
    ids = torch.randint(3, 300, (1, 9))
    with torch.no_grad():
        assert torch.equal(
            captioner.model(input_ids=ids).logits[..., : plain.config.vocab_size], plain(ids).logits
        )
    assert captioner.tokenizer.convert_tokens_to_ids(IMAGE) == plain.config.vocab_size
    assert captioner.model.config.image_token_id == plain.config.vocab_size
    assert captioner.model.lm_head.weight is captioner.language.embed_tokens.weight


def test_rows_lead_to_what_the_picture_leads_to(folder):
    """Logits and greedy text from our rows are those of transformers on its processor's ids and pixels."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    own = SmolLlava.open(folder)
    answers = own.text_ids([tell(sample_scene(0, i)).text for i in (5, 6)])
    prompts = [own.prompt_ids(text) for text in ("describe the scene", "what colour is the mug?")]
    rows = torch.cat([own.rows(model_picture(0, i, SIDE)[None]) for i in (5, 6)])
    with torch.no_grad():
        found = own.logits(rows, padded(prompts), padded(answers))
    spoken = own.speak(rows, padded(prompts), 8)
    for place, index in enumerate((5, 6)):
        said_ = [
            {"type": "image"},
            {"type": "text", "text": ("describe the scene", "what colour is the mug?")[place]},
        ]
        text = processor.apply_chat_template(
            [{"role": "user", "content": said_}], add_generation_prompt=True, chat_template=TEMPLATE
        )
        batch = processor(
            images=Image.fromarray(render(sample_scene(0, index))),
            text=text,
            return_tensors="pt",
            add_special_tokens=False,
        )
        start = batch["input_ids"].shape[1]
        ids = torch.cat([batch["input_ids"], torch.tensor([answers[place]])], 1)
        with torch.no_grad():
            logits = own.model(input_ids=ids, pixel_values=batch["pixel_values"]).logits[0, start - 1 : -1]
        assert torch.allclose(found[place, : len(logits)], logits, atol=1e-3)
        direct = own.model.generate(**batch, max_new_tokens=8, do_sample=False)[0, start:].tolist()
        assert direct[: len(spoken[place])] == spoken[place]


def test_exits_are_read_at_the_rows_before_the_targets(captioner):
    ids = captioner.text_ids([tell(sample_scene(0, 5)).text])
    rows, prompts = torch.randn(1, *captioner.shape), padded([captioner.caption_prompt()])
    with torch.no_grad():
        last = captioner.head(captioner.layer_rows(rows, prompts, padded(ids), [4])[4])
        assert torch.allclose(last, captioner.logits(rows, prompts, padded(ids)), atol=1e-5)
    assert musts(captioner)["early_exit_1_alpha"][0] == 0.0


def test_words_of_several_tokens_belong_to_one_part(captioner):
    text = tell(sample_scene(0, 5)).text
    (ids,) = captioner.text_ids([text])
    found = token_parts(captioner, ids)
    assert len(found) == len(ids) > len(text.split()) + 1
    pieces = captioner.tokenizer.convert_ids_to_tokens(ids[:-1])
    spelled = "".join(pieces).replace("Ġ", " ")
    assert spelled == text
    marked = {w for w in text.replace(",", " ").replace(".", " ").split() if parts_of([w]) == ["fact"]}
    at = 0
    for piece, part in zip(pieces, found[:-1], strict=True):
        word = next(w for w in _spans(text) if w[0] <= at + piece.startswith("Ġ") < w[1])
        if part == "fact":
            assert text[word[0] : word[1]] in marked
        at += len(piece)
    assert {"fact", "style", "plan"} == set(found)


def _spans(text: str) -> list[tuple[int, int]]:
    return [m.span() for m in re.finditer(r"\w+|[^\w\s]", text)]


@pytest.mark.slow
def test_a_resumed_vision_stage_is_the_uninterrupted_one(language, tmp_path):
    def run(work: str, **more) -> int:
        model = build_model(language, build_tokenizer(language), 0)
        return train_vision(tmp_path / work, model, 4, **SEEN, **more)

    assert run("one") == 4
    assert run("two", stop_at=2) == 2
    assert run("two") == 4
    one, two = (torch.load(tmp_path / n / "vision/state.pt", weights_only=True) for n in ("one", "two"))
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    line = json.loads((tmp_path / "one/vision/log.jsonl").read_text().splitlines()[-1])
    assert {"words", "kind", "colour", "count"} <= set(line)


@pytest.mark.slow
def test_rows_begin_to_say_their_words(language, tmp_path, monkeypatch):
    monkeypatch.setattr(vision_stage, "VALIDATION", TRAIN)
    options = {"size": 2, "batch": 2, "precision": "fp32", "checked": 2, "lr": 6e-3}
    train_vision(tmp_path, build_model(language, build_tokenizer(language), 0), 50, **options)
    lines = [json.loads(line) for line in (tmp_path / "vision/log.jsonl").read_text().splitlines()]
    assert lines[0]["words"] > 2.0 > 1.5 > lines[1]["words"], lines


def test_a_projector_says_words_as_the_language_model_does(language, tmp_path, monkeypatch):
    """Of rows that tell their words, if in a language of their own."""
    tokenizer = build_tokenizer(language)
    model = build_model(language, tokenizer, 0)
    tower = {n: p.clone() for n, p in model.model.vision_tower.state_dict().items()}
    torch.manual_seed(3)
    truth, code = torch.randint(0, len(WORDS), (4000,)), torch.randn(len(WORDS), WIDTH)
    rows = 5 * (code[truth] + 0.1 * torch.randn(4000, WIDTH))
    monkeypatch.setattr(projecting, "_rows", lambda *_: (rows, truth))
    assert fit_projector(model, tokenizer, tmp_path / PROJECTOR, 0, pictures(1), steps=300) < 0.1
    with torch.no_grad():
        found = model.model.multi_modal_projector(rows[:500])
    best = torch.cdist(found, word_rows(model, tokenizer)).argmin(-1)
    assert (best == truth[:500]).float().mean() > 0.95
    assert all(torch.equal(tower[n], p) for n, p in model.model.vision_tower.state_dict().items())
    assert not any(p.requires_grad for p in model.model.multi_modal_projector.parameters())


def test_rows_and_their_words_belong_together(language):
    model = build_model(language, build_tokenizer(language), 0)
    rows, truth = projecting._rows(model.model.vision_tower, 0, pictures(3))
    for place in range(3):
        own = slice(place * ROWS, (place + 1) * ROWS)
        with torch.no_grad():
            seen = encode(model.model.vision_tower, torch.from_numpy(pictures(3)[place : place + 1]))[0]
        assert torch.allclose(rows[own], seen, atol=1e-5)
        labels = {n: v[None] for n, v in scene_labels(sample_scene(0, TRAIN[place])).items()}
        assert truth[own].tolist() == said(labels, ROWS)[0].tolist()


def test_patches_are_asked_for_the_object_that_they_show(tmp_path):
    labels = label_table(tmp_path / "labels.npz", 0, TRAIN[:20], GRID, workers=2)
    assert labels["owner"].shape == (40, GRID, GRID)
    truth = patch_truth(labels)
    assert truth.shape == (40, ROWS, len(PATCH_CLASSES))
    for row, index in enumerate(TRAIN[:20]):
        objects, owner = sample_scene(0, index).objects, labels["owner"][row].flatten()
        assert {*owner} <= {*range(-1, len(objects))} and (owner >= 0).any()
        for patch, place in enumerate(owner):
            said_ = dict(zip(PATCH_CLASSES, truth[row, patch], strict=True))
            assert said_["ordinal"] == (place if place >= 0 else 5)
            assert said_["kind"] == (KINDS.index(objects[place].kind) if place >= 0 else NONE)
            assert said_["lane"] == (objects[place].lane if place >= 0 else NONE)
    worst = torch.full((40, ROWS, sum(PATCH_CLASSES.values())), -9.0)
    at = 0
    for place, count in enumerate(PATCH_CLASSES.values()):
        known = torch.from_numpy(truth[..., place].clip(0))
        worst[..., at : at + count].scatter_(-1, known[..., None], 9.0)
        at += count
    assert patch_loss(worst, torch.from_numpy(truth)) < 1e-4 < 1 < patch_loss(-worst, torch.from_numpy(truth))


def test_the_loss_is_that_of_the_logits(captioner):
    batch = Batches(captioner, 0, TRAIN[:40], 3, 3, ("describe the scene",)).asked(0)
    rows = torch.randn(3, *captioner.shape)
    with torch.no_grad():
        logits = captioner.logits(rows, batch.prompts, batch.targets)
        assert torch.allclose(
            captioner.loss(rows, batch.prompts, batch.targets), cross_entropy(logits, batch.targets)
        )


def test_rows_of_pictures_that_are_rendered_already_are_those_of_scenes(captioner, tmp_path):
    one = image_rows(tmp_path / "one.f16", captioner, 0, TRAIN[:3])
    two = image_rows(tmp_path / "two.f16", captioner, 0, TRAIN[:3], shown=pictures(3))
    assert one.any() and np.array_equal(one, two)


def test_projector_trains_with_all_layers(captioner):
    model = captioner.model
    learned = [n for n, _ in learning(model, frozen(model, 4))]
    model.requires_grad_(False)
    assert {name.split(".")[1] for name in learned} == {"language_model", "multi_modal_projector"}
    assert not any("embed_tokens" in name for name in learned)


@pytest.fixture(scope="module")
def seen(language, tmp_path_factory) -> Path:
    """A finished vision stage, with its projector."""
    work, tokenizer = tmp_path_factory.mktemp("seen"), build_tokenizer(language)
    model = build_model(language, tokenizer, 0)
    train_vision(work, model, 1, **SEEN)
    fit_projector(model, tokenizer, work / "vision" / PROJECTOR, 0, pictures(2), steps=2)
    return work / "vision"


def test_a_model_takes_tower_and_projector(language, seen):
    model = build_model(language, build_tokenizer(language), 1)
    take_vision(model, seen)
    state = torch.load(seen / "state.pt", weights_only=True)["model"]
    own = {f"tower.{n}": p for n, p in model.model.vision_tower.named_parameters()}
    assert own and all(torch.equal(state[name], p) for name, p in own.items())
    stored = torch.load(seen / PROJECTOR, weights_only=True)
    projector = model.model.multi_modal_projector
    assert all(torch.equal(stored[name], p) for name, p in projector.state_dict().items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_training_is_the_uninterrupted_one(language, seen, tmp_path, brief, optimizer):
    small = SMALL | {"optimizer": optimizer}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vision").symlink_to(seen)
    assert train(tmp_path / "one", 6, language, **small) == 6
    assert train(tmp_path / "two", 6, language, stop_at=3, **small) == 3
    assert train(tmp_path / "two", 6, language, **small) == 6
    one, two = (torch.load(tmp_path / n / "state.pt", weights_only=True) for n in ("one", "two"))
    assert one["step"] == two["step"] == 6
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    learned = {name.split(".layers.")[-1].split(".")[0] for name in one["model"] if ".layers." in name}
    assert learned == {"2", "3"} and "model.language_model.norm.weight" in one["model"]
    assert not any("vision_tower" in name or "embed_tokens" in name for name in one["model"])
    with pytest.raises(OptionError, match=r"trained with lr 0\.001, not 0\.01"):
        train(tmp_path / "two", 6, language, lr=1e-2, **small)
    (other,) = {*OPTIMIZERS} - {optimizer}
    with pytest.raises(OptionError, match=f"trained with optimizer '{optimizer}', not '{other}'"):
        train(tmp_path / "two", 6, language, **SMALL | {"optimizer": other})


def test_questions_and_captions_are_those_of_every_recipe(captioner):
    batch = Batches(captioner, 0, TRAIN[:40], 4, 4, ("describe the scene",)).asked(0)
    texts = captioner.say([[t for t in row if t >= 0] for row in batch.prompts.tolist()])
    assert all(text.startswith("\n") and text.endswith("assistant\n") for text in texts), texts
    assert frozen(captioner.model, 2)[-1] == "model.language_model.layers.1."
    assert captioner_of("LlavaForConditionalGeneration") is SmolLlava


@pytest.mark.slow
def test_a_bundle_gives_the_tokens_of_the_model(folder, tmp_path):
    checkpoint = open_checkpoint(str(folder))
    assert family_for(checkpoint).name == "llava"
    build_bundle(BuildRequest(model=str(folder), output=tmp_path / "bundle", parity=False))
    own = SmolLlava.open(folder)
    with Session.load(tmp_path / "bundle") as session:
        for index in HELDOUT[:2]:
            rows = own.rows(model_picture(0, index, SIDE)[None])
            for prompt in ("describe the scene", "what colour is the mug?"):
                expected = own.speak(rows, padded([own.prompt_ids(prompt)]), 12)[0]
                found = session.generate(
                    image=Image.fromarray(render(sample_scene(0, index))), prompt=prompt, max_new_tokens=12
                )
                assert list(found.tokens) == expected


@pytest.mark.slow
def test_one_command_makes_a_model_with_its_record_and_evaluation(language, tmp_path, monkeypatch, brief):
    monkeypatch.setattr(recipe, "fit_projector", partial(fit_projector, steps=2))
    words = ["--language", language, "--pictures", 12, "--steps", 2, "--vision-steps", 2, "--captions", 2]
    words += ["--questions", 2, "--scenes", 4, "--threads", 1, "--precision", "fp32", "--out", tmp_path]
    monkeypatch.setattr("sys.argv", ["recipe", *map(str, words)])
    recipe.main()
    record = json.loads((tmp_path / "model" / "recipe.json").read_text())
    assert record["command"].endswith("smollm2_llava") and record["curve"][-1]["step"] == 2
    assert record["vision_curve"][-1]["step"] == 2
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["scenes"] == 4 and not found["musts"]["facts"]["met"] and np.isfinite(found["answers"])


def test_a_step_computes_where_the_model_lies(language, monkeypatch):
    """On the meta device, which knows shapes alone and refuses what lies elsewhere."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    tokenizer = build_tokenizer(language)
    captioner = SmolLlava(build_model(language, tokenizer, 0).to("meta"), tokenizer)
    trained = learning(captioner.model, frozen(captioner.model, 4))
    for batch in (
        Batches(captioner, 0, TRAIN[:40], 3, 3).told(0),
        Batches(captioner, 0, TRAIN[:40], 3, 3).asked(0),
    ):
        loss = captioner.loss(torch.randn(3, *captioner.shape), batch.prompts, batch.targets)
        loss.backward()
        assert loss.device.type == "meta" and all(p.grad is not None for _, p in trained)
    with torch.no_grad():
        last, middle = encode_all(captioner.model.model.vision_tower, torch.from_numpy(pictures(2)), [3])
    assert last.device.type == middle.device.type == "meta" and last.shape == (2, ROWS, WIDTH)
