"""The recipe of `tiny-smolvlm2` at a size that trains in seconds."""

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
from vlmexport.calibration.data.scenes import HELDOUT, TRAIN, VALIDATION, ask, render, sample_scene, tell
from vlmexport.calibration.data.scenes.dataset import model_picture
from vlmexport.calibration.data.scenes.vocabulary import KINDS
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import OptionError

from recipes.common.captioner import IGNORED, padded
from recipes.common.evaluation import musts
from recipes.common.labels import NONE, PATCH_CLASSES, SLOT_CLASSES, asked_loss, asked_right, label_table
from recipes.common.packing import packed
from recipes.models import captioner_of
from recipes.tiny_smolvlm2 import __main__ as recipe
from recipes.tiny_smolvlm2 import model as architecture
from recipes.tiny_smolvlm2.captioner import SmolVLM2
from recipes.tiny_smolvlm2.checks import COARSE, DETAILS, TileChecks, evaluate_tiles
from recipes.tiny_smolvlm2.model import build_model, save_bundle
from recipes.tiny_smolvlm2.tiles import (
    GRID,
    SIDE,
    TILE_ROWS,
    TILED,
    TILES,
    WHOLE,
    by_row,
    cut,
    pixels_of,
)
from recipes.tiny_smolvlm2.tokenizer import END, PAD, build_tokenizer
from recipes.tiny_smolvlm2.train import PASSES, WHOLE_SHARE, TilesStage, train
from recipes.tiny_smolvlm2.vision_stage import take_vision, train_vision, truths_of

SMALL = {"pictures": 6, "captions": 4, "precision": "fp32", "checked": 2}
SEEN = {"size": 6, "batch": 3, "precision": "fp32", "checked": 3}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def captioner(tokenizer) -> SmolVLM2:
    return SmolVLM2(build_model(tokenizer).eval(), tokenizer)


@pytest.fixture(scope="module")
def folder(captioner, tokenizer, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("recipe") / "model"
    save_bundle(captioner.model, tokenizer, place, 160)
    return place


@pytest.fixture(scope="module")
def stored(folder) -> SmolVLM2:
    return SmolVLM2.open(folder)


@pytest.fixture
def brief(monkeypatch):
    """A model that knows nothing never ends: its answers are cut at six tokens."""
    real = SmolVLM2.generate
    monkeypatch.setattr(
        SmolVLM2, "generate", lambda self, rows, prompts, longest: real(self, rows, prompts, min(longest, 6))
    )


@pytest.fixture
def shallow(monkeypatch):
    """Four layers of the decoder."""
    monkeypatch.setattr(architecture, "DECODER_LAYERS", 4)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Path:
    """The folder of a finished vision stage of two steps."""
    work = tmp_path_factory.mktemp("seen")
    train_vision(work, 2, **SEEN)
    return work


def pictures(*indices: int) -> np.ndarray:
    return np.stack([model_picture(0, index, SIDE) for index in indices])


def lines_of(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_every_word_is_one_token(tokenizer):
    for index in (*TRAIN[:120], *HELDOUT[:120]):
        asked = ask(sample_scene(0, index), 1)
        for text in (
            tell(sample_scene(0, index)).text,
            asked.text,
            asked.text.capitalize(),
            asked.answer,
        ):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(re.findall(r"\w+|[^\w\s]", text)), text
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert tokenizer.unk_token_id not in ids
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)


def test_a_prompt_names_every_tile(captioner, tokenizer):
    for shown, rows in ((TILED, TILES * TILE_ROWS), (WHOLE, TILE_ROWS)):
        head = captioner.head_of(shown)
        tokens = tokenizer.convert_ids_to_tokens(head.ids.tolist())
        assert tokens[:3] == ["<|im_start|>", "▁User", ":"] and tokenizer.unk_token not in tokens
        assert len(head.places) == rows == tokens.count("<image>") and head.next == len(tokens)
        assert sum(token.startswith("<row_") for token in tokens) == (9 if shown == TILED else 0)
        assert tokens[-TILE_ROWS - 2] == "<global-img>"  # behind all tiles


@pytest.mark.parametrize("side", [96, 384, 500])
def test_tiles_are_those_of_the_processor(folder, side):
    processor = transformers.SmolVLMImageProcessorPil.from_pretrained(folder)
    picture = Image.fromarray(render(sample_scene(0, HELDOUT[3]), side))
    found = processor(images=[[picture]], return_row_col_info=True, return_tensors="pt")
    assert (found["rows"][0][0], found["cols"][0][0]) == (3, 3)
    small = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    ours = pixels_of(small[None])
    assert ours.shape == (1, TILES, 3, 32, 32) and torch.allclose(found["pixel_values"], ours, atol=1e-5)
    if side == 384:
        assert np.array_equal(small, model_picture(0, HELDOUT[3], SIDE))


def test_labels_of_patches_lie_where_the_rows_show_them(captioner):
    """A picture whose patches are grey in the order of their numbers: what the pixel shuffle puts into a row says which."""
    numbers = np.arange(GRID * GRID)
    patches = numbers.reshape(GRID, GRID).repeat(8, 0).repeat(8, 1).astype(np.uint8)
    tiles = torch.from_numpy(cut(np.stack([patches] * 3, -1)[None])[0, :-1, ..., :1]).float()
    means = tiles.unflatten(1, (4, 8)).unflatten(3, (4, 8)).mean((2, 4)).flatten(1, 2)  # [9, 16, 1]
    shuffled = captioner.model.model.connector.pixel_shuffle(means, 2)  # [9, 4, 4]
    assert torch.equal(shuffled.flatten(0, 1).long(), by_row(torch.from_numpy(numbers)[None])[0])


def test_truths_are_those_of_the_scene(tmp_path):
    labels = label_table(tmp_path / "labels.npz", 0, TRAIN[:20], GRID)
    truths = truths_of(labels)
    assert truths["tile"].shape == (40, (TILES - 1) * TILE_ROWS, 4, len(PATCH_CLASSES))
    assert truths["whole"].shape == (40, 5, len(SLOT_CLASSES)) and truths["setting"].shape == (40, 2, 4)
    for place, index in enumerate(TRAIN[:20]):
        objects = sample_scene(0, index).objects
        kinds = truths["whole"][place, :, 0].tolist()
        assert kinds[: len(objects)] == [KINDS.index(item.kind) for item in objects]
        shown = truths["tile"][place].flatten(0, 1)
        assert {*shown[:, 0].tolist()} - {NONE} == {KINDS.index(item.kind) for item in objects}
        assert ((shown[:, -1] == 5) == (shown[:, 0] == NONE)).all()


def test_losses_and_right_answers_of_questions_side_by_side():
    classes = {"one": 3, "two": 2}
    truth = torch.tensor([[2, 0], [NONE, 1]])
    asked = torch.tensor([[-9.0, -9, 9, 9, -9], [9, -9, -9, 9, -9]])
    right = asked_right(asked, truth, classes)
    assert {name: value.tolist() for name, value in right.items()} == {"one": [1, -1], "two": [1, 0]}
    assert asked_loss(asked, truth, classes) == pytest.approx(18 / 2 / 2, abs=1e-3)


@pytest.mark.parametrize("shown", [TILED, WHOLE], ids=["tiles", "whole"])
def test_sequences_are_those_of_transformers(captioner, shown):
    """Logits of several texts behind shared rows, and greedy answers, from the pixels as transformers reads them."""
    own = captioner.answering(shown)
    rows = captioner.rows(pictures(3))
    assert tuple(rows.shape[1:]) == captioner.shape
    pixels = pixels_of(pictures(3)) if shown == TILED else pixels_of(pictures(3))[:, -1:]
    prompts = [own.prompt_ids(text) for text in ("is the mug striped?", "describe the scene")]
    targets = own.text_ids(["yes, it has stripes", tell(sample_scene(0, 3)).text])
    head, rows = own.head_of(shown), rows[:, shown.stored]
    batch = packed(head, [list(zip(prompts, targets, strict=True))])
    with torch.no_grad():
        found = own.model.lm_head(own.hidden(head, rows, batch).last_hidden_state)[0]
        for number, (prompt, target) in enumerate(zip(prompts, targets, strict=True), 1):
            ids = torch.tensor([[*head.ids.tolist(), *prompt, *target]])
            theirs = own.model(input_ids=ids, pixel_values=pixels).logits[0]
            places = (batch.group[0] == number).nonzero()[:, 0]
            assert torch.allclose(found[places], theirs[len(head.ids) :], atol=1e-4)
            learned = batch.targets[0, places]
            assert learned[learned != IGNORED].tolist() == target
            alone = own.logits(rows, padded([prompt]), padded([target]))[0]
            assert torch.allclose(alone, theirs[ids.shape[1] - len(target) - 1 : -1], atol=1e-4)
        greedy = own.speak(rows.repeat(2, 1, 1), padded(prompts), 6)
        for prompt, answer in zip(prompts, greedy, strict=True):
            ids = torch.tensor([[*head.ids.tolist(), *prompt]])
            out = own.model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=6, do_sample=False)
            assert out[0, ids.shape[1] :].tolist() == answer


def test_an_early_layer_is_read_where_the_target_is_said(captioner):
    rows = torch.randn(2, *captioner.shape)
    prompts = padded([captioner.prompt_ids("what do you see?"), captioner.prompt_ids("")])
    targets = padded(captioner.text_ids(["nothing at all", "yes"]))
    with torch.no_grad():
        last = captioner.head(captioner.layer_rows(rows, prompts, targets, [12])[12])
        assert torch.allclose(last, captioner.logits(rows, prompts, targets), atol=1e-5)


def test_a_step_has_pictures_in_tiles_and_whole_ones(captioner):
    stage = TilesStage(6, pictures=40, captions=8, checked=2)
    texts = stage.texts(captioner, ())
    early, late, again = texts.draw(0), texts.draw(3), stage.texts(captioner, ()).draw(3)
    assert [batch.media for batch in early] == [TILED] * PASSES + [WHOLE]
    assert [len(batch.rows) for batch in late] == [8 // PASSES] * PASSES + [8 // WHOLE_SHARE]
    assert [int(batch.packed.group.max()) for batch in (early[0], late[0])] == [2, 2 + stage.questions]
    for one, two in zip(late, again, strict=True):
        assert torch.equal(one.packed.ids, two.packed.ids) and np.array_equal(one.rows, two.rows)
    assert len({tuple(batch.rows) for batch in (*early, *late)}) == 2 * (PASSES + 1)
    known = np.random.default_rng(0).standard_normal((80, *captioner.shape)).astype(np.float16)
    known[:, :-TILE_ROWS] = np.nan  # a whole picture's sequence has none of the tiles' rows
    with torch.no_grad():
        parts = list(texts.losses(3, late, known))
    losses = parts[0] | parts[-1]
    assert {"whole_caption", "whole_answer", "whole_roll_call", "answer"} <= set(losses)
    assert all(torch.isfinite(value) for name, (_, value) in losses.items() if name.startswith("whole_"))
    assert torch.isnan(losses["answer"][1]) and losses["whole_answer"][0] == 1 / WHOLE_SHARE


def test_checks_tell_whether_the_tiles_are_read(captioner, monkeypatch):
    """A model that knows an answer about a detail where it sees the right tiles only, and a coarse one from the whole picture."""
    checks = TileChecks(captioner, 0, VALIDATION[:6])
    assert all(asked.kind in DETAILS for asked in checks.details)
    assert all(asked.kind in COARSE for asked in checks.coarse)
    said = {}
    for asked, own in ((checks.details, slice(0, 4)), (checks.coarse, slice(-TILE_ROWS, None))):
        for question, rows in zip(asked, checks.rows, strict=True):
            said[tuple(captioner.prompt_ids(question.text)), rows[own].numpy().tobytes()] = question.answer

    def speak(self, rows, prompts, longest=160):
        found = []
        for embeds, prompt in zip(rows, prompts.tolist(), strict=True):
            key = tuple(token for token in prompt if token >= 0)
            answers = (
                said.get((key, embeds[own].numpy().tobytes()))
                for own in (slice(0, 4), slice(-TILE_ROWS, None))
            )
            found.append(self.text_ids([next((answer for answer in answers if answer), "nobody knows")])[0])
        return found

    monkeypatch.setattr(SmolVLM2, "speak", speak)
    figures = evaluate_tiles(captioner, 0, VALIDATION[:6])
    assert (figures["details"], figures["details_whole"], figures["details_gain"]) == (1.0, 0.0, 1.0)
    assert figures["details_other_tiles"] == 0.0 and figures["coarse"] == figures["coarse_whole"] == 1.0
    assert checks.figures() == {"details": 1.0, "details_whole": 0.0}
    assert set(captioner.further_musts()) == {"details_gain"} <= set(figures)


def test_a_resumed_vision_stage_is_the_uninterrupted_one(tmp_path):
    assert train_vision(tmp_path / "one", 3, **SEEN) == 3
    assert train_vision(tmp_path / "two", 3, stop_at=2, **SEEN) == 2
    assert train_vision(tmp_path / "two", 3, **SEEN) == 3
    one, two = (torch.load(tmp_path / n / "vision" / "state.pt", weights_only=True) for n in ("one", "two"))
    assert one["step"] == two["step"] == 3 and len(one["model"]) > 50
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    line = lines_of(tmp_path / "two" / "vision" / "log.jsonl")[-1]
    assert {"tile_kind", "tile_pattern", "whole_kind", "whole_lane", "setting_table"} <= set(line)


@pytest.mark.slow  # a training in every run learns something already
def test_rows_begin_to_say_what_lies_where(tmp_path):
    train_vision(tmp_path, 75, **SEEN | {"size": 2, "lr": 6e-3})
    first, *_, last = lines_of(tmp_path / "vision" / "log.jsonl")
    assert first["tile"] > 0.8 > 0.4 > last["tile"] and last["whole"] < 0.5 * first["whole"], (first, last)


def test_a_model_takes_the_tower_and_the_connector(seen, tokenizer):
    model = build_model(tokenizer, 1)
    take_vision(model, seen / "vision" / "state.pt")
    state = torch.load(seen / "vision" / "state.pt", weights_only=True)["model"]
    for name in ("vision_model", "connector"):
        own = {f"{name}.{n}": p for n, p in getattr(model.model, name).named_parameters()}
        assert own and all(torch.equal(state[n], p) for n, p in own.items())


def _with_vision(seen: Path, *works: Path) -> None:
    for work in works:
        work.mkdir()
        (work / "vision").symlink_to(seen / "vision")


def test_a_resumed_training_is_the_uninterrupted_one(seen, tmp_path, brief, shallow):
    one, two = tmp_path / "one", tmp_path / "two"
    _with_vision(seen, one, two)
    assert train(one, 6, **SMALL) == 6
    assert train(two, 6, stop_at=3, **SMALL) == 3
    assert train(two, 6, **SMALL) == 6
    first, second = (torch.load(work / "state.pt", weights_only=True) for work in (one, two))
    assert all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())
    assert {name.split(".")[1] for name in first["model"] if name != "lm_head.weight"} == {"text_model"}
    last = lines_of(two / "log.jsonl")[-1]
    figures = {"facts", "answers", "details", "details_whole", "early_exit_1_alpha"}
    assert figures | {"caption", "caption_seen", "answer", "roll_call", "whole_answer"} <= set(last)
    assert "dense" not in (two / "model" / "config.json").read_text()
    with pytest.raises(OptionError, match=rf"trained with lr {TilesStage.lr}, not 0\.001"):
        train(two, 6, lr=1e-3, **SMALL)


def test_a_few_steps_teach_what_a_bundle_says_like_transformers(seen, tmp_path, brief, shallow):
    """The loss falls; the folder is of the published layout, builds, and gives transformers' tokens, of a wide picture, too."""
    work = tmp_path / "work"
    _with_vision(seen, work)
    train(work, 50, **SMALL | {"lr": 6e-3})
    first, last = lines_of(work / "log.jsonl")
    assert first["caption"] > 5.0 > 4.5 > last["caption"] and last["caption_seen"] < 4.0, (first, last)
    build_bundle(BuildRequest(model=str(work / "model"), output=tmp_path / "bundle", parity=False))
    checkpoint = open_checkpoint(str(work / "model"))
    family, own = family_for(checkpoint), SmolVLM2.open(work / "model")
    square, answers = Image.fromarray(render(sample_scene(0, HELDOUT[0]), 384)), set()
    with Session.load(tmp_path / "bundle") as session:
        for picture, tiles in ((square, 10), (square.resize((384, 250)), 7)):
            for prompt in ("describe the scene", "what colour is the mug?"):
                wanted = family.reference_prompt(picture, prompt)
                assert wanted.vision is not None
                pixels = wanted.vision["pixel_values"].transpose(0, 1)
                assert pixels.shape[1] == tiles
                ids = torch.tensor([list(wanted.input_ids)])
                out = own.model.generate(
                    input_ids=ids,
                    pixel_values=pixels,
                    max_new_tokens=12,
                    do_sample=False,
                    eos_token_id=own.end,
                )
                found = session.generate(image=picture, prompt=prompt, max_new_tokens=12)
                assert list(found.tokens) == out[0, ids.shape[1] :].tolist()
                answers.add(tuple(found.tokens))
        rows = own.rows(pictures(HELDOUT[0]))
        expected = own.speak(rows, padded([own.prompt_ids("describe the scene")]), 6)[0]
        found = session.generate(image=square, prompt="describe the scene", max_new_tokens=6)
        assert list(found.tokens) == expected
    assert len(answers) > 1


def test_the_folder_is_one_of_the_family(folder, stored, captioner):
    family = family_for(open_checkpoint(str(folder)))
    assert family.name == "smolvlm" and family.video_token_id is None
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
        "processor_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(p.stat().st_size for p in folder.iterdir()) < 8_000_000
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    assert (text["num_hidden_layers"], text["num_attention_heads"], text["num_key_value_heads"]) == (12, 4, 2)
    assert (vision["image_size"], vision["patch_size"], config["scale_factor"]) == (32, 8, 2)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    assert settings["size"] == {"longest_edge": 96} and settings["max_image_size"] == {"longest_edge": 32}
    loaded = stored.model.state_dict()
    assert all(torch.equal(v.half().float(), loaded[n]) for n, v in captioner.model.state_dict().items())
    assert captioner_of("SmolVLMForConditionalGeneration") is SmolVLM2
    assert musts(captioner)["details_gain"] == (0.1, 1.0)


@pytest.mark.slow
def test_one_command_makes_a_model_with_its_record_and_evaluation(tmp_path, brief, shallow, monkeypatch):
    words = "--vision-steps 2 --vision-batch 2 --pictures 6 --steps 2 --captions 4 --checked 2 --scenes 4 --threads 1"
    monkeypatch.setattr("sys.argv", ["recipe", "--out", str(tmp_path), "--precision", "fp32", *words.split()])
    recipe.main()
    record = json.loads((tmp_path / "model" / "recipe.json").read_text())
    assert record["command"].endswith("tiny_smolvlm2") and record["curve"][-1]["step"] == 2
    assert record["vision_curve"][-1]["step"] == 2
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["scenes"] == 4 and not found["musts"]["details_gain"]["met"]
    assert {"details_by_type", "details_whole_by_type", "details_other_tiles", "facts_whole"} <= set(found)
