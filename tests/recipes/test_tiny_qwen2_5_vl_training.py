"""The recipe of `tiny-qwen2.5-vl` at a size that trains in seconds."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.functional as F
from PIL import Image
from vlmexport.calibration.data.scenes import HELDOUT, TRAIN, VALIDATION, ask, render, sample_scene, tell
from vlmexport.calibration.data.scenes.dataset import film_pictures, model_picture, resized
from vlmexport.calibration.data.scenes.film import sample_film
from vlmexport.calibration.data.scenes.film_asking import ask_film, film_facts
from vlmexport.calibration.data.scenes.film_story import tell_film
from vlmexport.calibration.data.scenes.film_words import CHANGES, DEEDS, SPOTS
from vlmexport.calibration.data.scenes.pair import ask_pair, sample_pair
from vlmexport.calibration.data.scenes.words import KINDS, LANES, NUMBERS, SIZES, meanings
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.common.tiny_models import tiny_model
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.images.video import Video

from recipes import tiny_drafts
from recipes.common import rows as stored
from recipes.common.ahead import drawn_ahead
from recipes.common.attention import (
    dense_grouped,
    use_dense_attention,
)
from recipes.common.captioner import IGNORED, cross_entropy, padded
from recipes.common.carry import begin_with, pack
from recipes.common.checks import Checks
from recipes.common.emphasis import (
    EMPHASIS,
    emphasis,
    seen_ids,
    seen_words,
    weighted_loss,
)
from recipes.common.folder import digest
from recipes.common.packed_batches import QUESTIONS
from recipes.common.packed_loss import part_of
from recipes.common.packing import packed
from recipes.common.roll_call import PROMPT, roll_call
from recipes.models import CAPTIONERS, captioner_of
from recipes.tiny_qwen2_5_vl import __main__ as recipe
from recipes.tiny_qwen2_5_vl import teacher, vision_stage
from recipes.tiny_qwen2_5_vl.average import save_mean
from recipes.tiny_qwen2_5_vl.batches import Batches
from recipes.tiny_qwen2_5_vl.captioner import Qwen25VL
from recipes.tiny_qwen2_5_vl.checks import ViewChecks, evaluate_views
from recipes.tiny_qwen2_5_vl.film_call import film_call
from recipes.tiny_qwen2_5_vl.layer_dropout import MOST, rates, without
from recipes.tiny_qwen2_5_vl.layout import (
    PAIR,
    PICTURE,
    Media,
    film_media,
    split_turn,
)
from recipes.tiny_qwen2_5_vl.model import build_model, save_bundle
from recipes.tiny_qwen2_5_vl.tokenizer import END, build_tokenizer
from recipes.tiny_qwen2_5_vl.tower import (
    FRAMES,
    SIDE,
    build_tower,
    encode,
    patches,
)
from recipes.tiny_qwen2_5_vl.train import LanguageStage, film_rows
from recipes.tiny_qwen2_5_vl.vision_stage import (
    RowHeads,
    batch_of,
    film_view,
    likeness,
    picture_view,
    train_vision,
)
from recipes.tiny_vit_gpt2.captioner import ViTGPT2

TEACHER = tiny_model("tiny-vit-gpt2")
SMALL = {"pictures": 6, "pairs": 4, "films": 12, "sizes": (2, 2, 2), "precision": "fp32", "checked": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def captioner(tokenizer):
    return Qwen25VL(build_model(tokenizer).eval(), tokenizer)


@pytest.fixture(scope="module")
def folder(captioner, tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("recipe") / "model"
    save_bundle(captioner.model, tokenizer, place, 160)
    return place


@pytest.fixture
def brief(monkeypatch):
    """A model that knows nothing never ends: its answers are cut at six tokens."""
    real = Qwen25VL.generate
    monkeypatch.setattr(
        Qwen25VL, "generate", lambda self, rows, prompts, longest: real(self, rows, prompts, min(longest, 6))
    )


@pytest.fixture
def few_checks(monkeypatch):
    """The command's checks look at two scenes, pairs and films."""
    monkeypatch.setattr(vision_stage, "CHECKED", 3)
    monkeypatch.setattr(teacher, "SAMPLE", 20)
    monkeypatch.setattr(recipe, "LanguageStage", partial(LanguageStage, checked=2))


@pytest.fixture(scope="module")
def taught():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher, "SAMPLE", 20)
        return teacher.Teacher(TEACHER, 0)


@pytest.fixture(scope="module")
def vision(tmp_path_factory, taught):
    """State of a vision stage of two steps."""
    place = tmp_path_factory.mktemp("seen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_stage, "CHECKED", 3)
        train_vision(place, 2, 20, taught, pictures=2, films=2, precision="fp32")
    return place / "vision" / "state.pt"


def test_every_word_is_one_token(tokenizer):
    for index in (*TRAIN[:120], *HELDOUT[:120]):
        asked = [
            ask(sample_scene(0, index), 1),
            ask_film(sample_film(0, index), 1),
            ask_pair(sample_pair(0, index)),
        ]
        texts = [tell(sample_scene(0, index)).text, tell_film(sample_film(0, index)).text]
        texts += [t for a in asked for t in (a.text, a.text.capitalize(), a.answer)]
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(re.findall(r"\w+|[^\w\s]", text)), text
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert tokenizer.unk_token_id not in ids
    for media in (PICTURE, PAIR, film_media(4)):
        head, tail = (tokenizer(part)["input_ids"] for part in split_turn(tokenizer, media))
        assert not any(
            len(token.strip("\u2581")) < 2
            for token in tokenizer.convert_ids_to_tokens(head)
            if token not in "\u2581a."
        )
        assert tokenizer.unk_token_id not in [*head, *tail]


def test_the_tower_is_that_of_transformers():
    tower = build_tower(0)
    pictures = np.stack([film_pictures(0, 3, SIDE)[:FRAMES], film_pictures(0, 4, SIDE)[:FRAMES]])
    pixels = patches(pictures)
    with torch.no_grad():
        theirs = tower(pixels.flatten(0, 1), grid_thw=torch.tensor([[1, 16, 16]] * 2)).pooler_output
        ours = encode(tower, pixels)
    assert theirs.std() > 0.1
    assert torch.allclose(ours.flatten(0, 1), theirs, atol=1e-5)


def test_labels_of_a_film_are_those_of_its_frames(taught):
    index = next(i for i in TRAIN[:50] if sample_film(0, i).events[0].time == 1)
    views = [film_view(0, index, 0, taught.side), picture_view(0, index, True, taught.side)]
    batch = batch_of(views, taught)
    labels = batch.labels
    assert tuple(batch.pixels.shape) == (2, 256, 1176) and batch.still.tolist() == [False, True]
    frames = sample_film(0, index).frames
    counts = [[len(frames[f].objects), len(sample_scene(0, index).objects)] for f in range(FRAMES)]
    assert [found["count"].tolist() for found in labels] == counts
    assert any(not torch.equal(labels[0][n][0], labels[1][n][0]) for n in ("kind", "lane", "owner"))
    assert all(torch.equal(labels[0][n][1], labels[1][n][1]) for n in labels[0])
    pictures = [resized(frame, taught.side) for frame in frames[:FRAMES]]
    pictures.append(resized(sample_scene(0, index), taught.side)[:, ::-1])
    one, two, mirrored = taught.rows(np.stack(pictures))
    assert torch.allclose(
        batch.taught, torch.stack([one, mirrored, two, mirrored]).unflatten(0, (2, 2)), atol=1e-4
    )
    assert not torch.allclose(one, two, atol=0.1)


def test_the_teacher_is_the_other_tower_with_directions_of_one_size(taught):
    pictures = np.stack([model_picture(0, index, taught.side) for index in TRAIN[:20]])
    rows = taught.rows(pictures).flatten(0, 1).double()
    assert rows.mean(0).abs().max() < 1e-4
    spread = (rows.T @ rows / len(rows)).diagonal()
    assert 0.9 < spread.max() <= 1.0 and (spread[1:] > 0.01).all()
    raw = ViTGPT2.open(TEACHER).rows(pictures)[:, 1:].flatten(0, 1).double()
    raw = raw - raw.mean(0)
    fitted = rows @ torch.linalg.lstsq(rows, raw).solution
    assert (fitted - raw).square().mean() < 1e-6 * raw.square().mean()


def test_rows_of_pictures_are_the_teachers_and_those_of_films_are_read(taught):
    """The errors that `likeness` counts, and what they ask of the tower."""
    index = next(i for i in TRAIN[:50] if sample_film(0, i).events[0].time == 1)
    batch = batch_of(
        [film_view(0, index, 0, taught.side), picture_view(0, index, False, taught.side)], taught
    )
    heads = RowHeads()
    for frame in range(FRAMES):
        error = (batch.taught[1 - frame, 0] - batch.taught[frame, 0]).square().mean() / FRAMES
        found = likeness(heads, batch.taught[frame], batch)
        assert torch.allclose(found, torch.stack([error, torch.zeros(())]), atol=1e-6) and error > 1e-3
    with torch.no_grad():
        heads.taught_heads[1].weight.zero_()
    moved = likeness(heads, batch.taught[0], batch)
    assert moved[1] < 1e-9 and torch.allclose(moved[0], batch.taught[1, 0].square().mean() / FRAMES)


def _inputs(captioner: Qwen25VL, media: Media, pictures: np.ndarray, ids: list[int]) -> dict[str, object]:
    """What transformers' own forward takes; pictures uint8 (n, side, side, 3)."""
    single = media.kind == "image"
    pairs = (
        np.repeat(pictures[:, None], FRAMES, 1)
        if single
        else pictures.reshape(-1, FRAMES, *pictures.shape[1:])
    )
    pixels = patches(pairs).flatten(0, 1)
    config = captioner.model.config
    whole = torch.tensor([ids])
    kinds = (whole == config.image_token_id).long() + 2 * (whole == config.video_token_id).long()
    found: dict[str, object] = {"input_ids": whole, "mm_token_type_ids": kinds}
    if single:
        return found | {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 16, 16]] * len(pairs))}
    return found | {
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[len(pairs), 16, 16]]),
        "second_per_grid_ts": [1.0],
    }


@pytest.mark.parametrize("media", [PICTURE, PAIR, film_media(4), film_media(6)], ids=str)
def test_sequences_are_those_of_transformers(captioner, media):
    """Logits of several texts behind shared rows, and greedy answers, from the pixels as transformers reads them."""
    index = 3
    if media.kind == "video":
        index = next(i for i in TRAIN[:50] if sample_film(0, i).count == media.count * FRAMES)
        pictures = film_pictures(0, index, SIDE)
        rows = film_rows(captioner, 0, index)[None]
    else:
        pictures = np.stack([model_picture(0, index + i, SIDE) for i in range(media.count)])
        rows = captioner.rows(pictures).flatten(0, 1)[None]
    own = captioner.answering(media)
    prompts = [
        own.prompt_ids(text) for text in ("what moved?", "describe the scene", "what colour is the wall?")
    ]
    targets = own.text_ids(["nothing", tell(sample_scene(0, 5)).text, "it is slate, i think"])
    head = own.head_of(media)
    batch = packed(head, [list(zip(prompts, targets, strict=True))])
    with torch.no_grad():
        found = own.model.lm_head(own.hidden(head, rows, batch).last_hidden_state)[0]
        for number, (prompt, target) in enumerate(zip(prompts, targets, strict=True), 1):
            ids = [*head.ids.tolist(), *prompt, *target]
            theirs = own.model(**_inputs(own, media, pictures, ids)).logits[0]
            places = (batch.group[0] == number).nonzero()[:, 0]
            assert torch.allclose(found[places], theirs[len(head.ids) :], atol=1e-4)
            alone = own.logits(rows, padded([prompt]), padded([target]))[0]
            assert torch.allclose(alone, theirs[len(ids) - len(target) - 1 : -1], atol=1e-4)
            learned = batch.targets[0, places]
            assert learned[learned != IGNORED].tolist() == target
        greedy = own.speak(rows.repeat(3, 1, 1), padded(prompts), 6)
        for prompt, answer in zip(prompts, greedy, strict=True):
            inputs = _inputs(own, media, pictures, [*head.ids.tolist(), *prompt])
            out = own.model.generate(**inputs, max_new_tokens=6, do_sample=False)[0]
            assert out[len(head.ids) + len(prompt) :].tolist() == answer


def test_an_early_layer_is_read_where_the_target_is_said(captioner):
    rows, prompts = (
        torch.randn(2, *captioner.shape),
        padded([captioner.prompt_ids("what do you see?"), captioner.prompt_ids("")]),
    )
    targets = padded(captioner.text_ids(["nothing at all", "yes"]))
    with torch.no_grad():
        first, last = map(captioner.head, captioner.layer_rows(rows, prompts, targets, (3, 12)).values())
        assert torch.allclose(last, captioner.logits(rows, prompts, targets), atol=1e-5)
    assert first.shape == last.shape == (2, targets.shape[1], len(captioner.tokenizer))
    assert not torch.allclose(first, last, atol=1e-2)


def test_batches_are_keyed_by_the_step_and_all_texts_are_fresh(captioner):
    one, two = (Batches(captioner, 0, 40, 30, 60, (3, 2, 2)) for _ in range(2))
    texts = {
        "of_captions": 2,
        "of_pictures": 2 + QUESTIONS,
        "of_pairs": QUESTIONS,
        "of_films": 2 + QUESTIONS,
    }
    for name in ("of_captions", "of_pictures", "of_pairs", "of_films"):
        batches = [getattr(one, name)(step) for step in range(3)]
        late = getattr(two, name)(2)
        assert torch.equal(late.packed.ids, batches[2].packed.ids)
        assert np.array_equal(late.rows, batches[2].rows) and late.media == batches[2].media
        for batch in batches:
            learned = batch.packed.targets != IGNORED
            assert (batch.packed.group.amax(1) == texts[name]).all()
            assert not (batch.told & ~learned).any() and batch.told.any() == (name != "of_pairs")
            assert not (batch.called & ~learned).any() and batch.called.any() == (name != "of_pairs")
            assert not (batch.called & batch.told).any()
            assert (batch.packed.targets == captioner.end).sum() == batch.packed.group.amax(1).sum()
    drawn = [one.of_films(step) for step in range(12)]
    assert {batch.media.count for batch in drawn} == {2, 3, 4}
    for batch in drawn:
        assert {sample_film(0, TRAIN[row]).count for row in batch.rows} == {batch.media.count * FRAMES}


def test_a_roll_call_says_what_is_true_of_every_kind_that_is_alone(tokenizer):
    kinds, sizes = meanings(KINDS), meanings(SIZES)
    lanes = {phrase: lane for lane, phrases in enumerate(LANES) for phrase in phrases}
    line = r"(\w+) (\w+) (\w+) (plain|striped) (\w+ (?:the )?\w+) left (nothing|a \w+ \w+) right (nothing|a \w+ \w+)\."

    def named(words: str) -> tuple[str, str] | None:
        return None if words == "nothing" else (words.split()[1], kinds[words.split()[2]])

    orders, called = set(), 0
    for index in TRAIN[:60]:
        scene = sample_scene(0, index)
        text = roll_call(scene, 1)
        assert (text == roll_call(scene, 1) and text != roll_call(scene, 2)) or not text
        there = [(item.colour, item.kind) for item in scene.objects]
        alone = [kind for _, kind in there if sum(kind == k for _, k in there) == 1]
        found = [match.groups() for match in re.finditer(line, text)]
        assert " ".join(match.group() for match in re.finditer(line, text)) == text
        assert sorted(kinds[f[0]] for f in found) == sorted(alone)
        orders.add(tuple(alone.index(kinds[f[0]]) for f in found))
        for kind, colour, size, pattern, lane, left, right in found:
            place = next(i for i, item in enumerate(scene.objects) if item.kind == kinds[kind])
            item = scene.objects[place]
            assert (item.colour, item.size, item.pattern) == (colour, sizes[size], pattern)
            assert item.lane == lanes[lane]
            assert named(left) == (there[place - 1] if place else None)
            assert named(right) == (there[place + 1] if place + 1 < len(there) else None)
            called += 1
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(re.findall(r"\w+|[^\w\s]", text)) and tokenizer.unk_token_id not in ids
    assert called > 100 and len(orders) > 8
    assert len(tokenizer(PROMPT)["input_ids"]) == 2


def test_a_roll_call_of_a_film_says_what_becomes_of_every_kind(tokenizer):
    kinds = meanings(KINDS)
    deeds = {word: deed for deed, words in DEEDS.items() for word in words} | {"is there": None}
    spots = {phrase: lane for lane, phrases in enumerate(SPOTS) for phrase in phrases}
    line = r"(\w+) (\w+) ({})(?: from (\w+ \w+) to (\w+ \w+))?\.".format("|".join(deeds))
    seen = set()
    for index in TRAIN[:60]:
        film = sample_film(0, index)
        text = film_call(film, 1)
        assert text == film_call(film, 1)
        there = [item.kind for item in film.scene.objects]
        events = {event.place: event for event in film.events}
        found = [match.groups() for match in re.finditer(line, text)]
        assert sorted(kinds[f[0]] for f in found) == sorted(k for k in there if there.count(k) == 1)
        for kind, colour, deed, start, end in found:
            place = there.index(kinds[kind])
            item, event = film.scene.objects[place], events.get(place)
            assert colour == item.colour and deeds[deed] == (event.kind if event else None)
            assert (start is None) == (deeds[deed] != "move")
            assert start is None or (spots[start], spots[end]) == (item.lane, event.lane)
            seen.add(deeds[deed])
        facts = film_facts(film)
        tail = f"{NUMBERS[int(facts['remain', ''])]} of them, {CHANGES[int(facts['change', ''])]}."
        assert text.endswith(tail)
        assert " ".join([*(match.group() for match in re.finditer(line, text)), tail]) == text
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(re.findall(r"\w+|[^\w\s]", text)) and tokenizer.unk_token_id not in ids
    assert seen == {"move", "appear", "leave", None}


def test_prefetched_batches_equal_local_ones(captioner):
    batches = Batches(captioner, 0, 40, 30, 60, (3, 2, 2))
    here, there = drawn_ahead(batches.of_films, 6, 0), drawn_ahead(batches.of_films, 6, 2)
    for step in range(2, 5):
        one, two = here(step), there(step)
        assert one.media == two.media and np.array_equal(one.rows, two.rows)
        assert torch.equal(one.packed.ids, two.packed.ids) and torch.equal(one.called, two.called)
    with pytest.raises(ValueError, match="step 3 was asked for, 5 comes next"):
        there(3)


def test_rows_that_several_processes_make_are_those_of_one(captioner, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "BLOCK", 2)
    one, two = (
        stored.image_rows(tmp_path / f"{workers}.f16", captioner, 0, TRAIN[:5], workers=workers)
        for workers in (1, 3)
    )
    assert (
        one.any() and np.abs(one.astype(np.float32) - two).max() < 2e-2 and not list(tmp_path.glob("*.done"))
    )


def test_the_losses_are_of_descriptions_answers_and_roll_calls(captioner):
    batches = Batches(captioner, 0, 4, 4, 4, (2, 2, 2))
    known = np.random.default_rng(0).standard_normal((8, 64, 128)).astype(np.float16)
    batch = batches.of_pictures(0)
    nothing = torch.tensor([], dtype=torch.long)
    with torch.no_grad():
        part = part_of(captioner, batch, known, ("caption", "answer", "roll_call"), nothing, 1.0)
        rows = torch.from_numpy(known[batch.rows]).float()
        hidden = captioner.hidden(captioner.head_of(PICTURE), rows, batch.packed).last_hidden_state
        logits = captioner.model.lm_head(hidden)
    group, last = batch.packed.group, 2 + QUESTIONS
    for name, where in (
        ("caption", group == 1),
        ("answer", (group > 1) & (group < last)),
        ("roll_call", group == last),
    ):
        own = batch.packed.targets.masked_fill(~where, IGNORED)
        assert torch.allclose(part[name][1], cross_entropy(logits, own))


def test_the_training_computes_attention_as_transformers_does(captioner, tokenizer, tmp_path):
    """Rows, losses and gradients; what is saved does not remember it."""
    dense = Qwen25VL(build_model(tokenizer).eval(), tokenizer)
    use_dense_attention(dense.language)
    batch = Batches(captioner, 0, 6, 4, 12, (2, 2, 2)).of_pictures(0)
    known = np.random.default_rng(0).standard_normal((12, 64, 128)).astype(np.float16)
    grown = []
    for one in (captioner, dense):
        one.model.zero_grad()
        losses = part_of(one, batch, known, ("caption", "answer", "roll_call"), seen_ids(tokenizer), 6.0)
        sum(value for _, value in losses.values()).backward()
        grown.append({n: p.grad for n, p in one.language.named_parameters()})
        one.model.zero_grad()
    assert dense.language.layers[0].self_attn.config._attn_implementation == "dense_grouped"
    for name, gradient in grown[0].items():
        torch.testing.assert_close(grown[1][name], gradient, atol=1e-5, rtol=1e-4)
    save_bundle(dense.model, tokenizer, tmp_path / "model", 160)
    assert "dense" not in (tmp_path / "model" / "config.json").read_text()


def test_attention_of_groups_is_that_of_repeated_keys():
    query, key, value = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    found, _ = dense_grouped(torch.nn.Identity(), query, key, value, seen, 8**-0.5)
    wanted = F.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), seen
    )
    torch.testing.assert_close(found, wanted.transpose(1, 2))


def test_words_of_the_picture_are_single_tokens_that_texts_use(tokenizer):
    words = seen_words()
    assert {"mug", "blue", "red", "small"} <= words
    assert not words & {"the", "a", "of", "it", "and", "stands", "perhaps", "objects", "behind", "moves"}
    ids = seen_ids(tokenizer)
    assert len(ids) == len(words)
    told = torch.tensor(
        [i for n in range(300) for i in tokenizer(tell(sample_scene(0, n), 1).text)["input_ids"]]
    )
    assert torch.isin(ids, told).all() and 0.1 < torch.isin(told, ids).float().mean() < 0.2


def test_words_of_the_picture_weigh_more_and_in_the_end_nothing_does(captioner, tokenizer):
    found = [emphasis(step, 12) for step in range(12)]
    assert found == pytest.approx([EMPHASIS] * 5 + [4.75, 3.5, 2.25] + [1.0] * 4)
    logits, targets = torch.randn(6, len(tokenizer)), torch.tensor([3, 5, 3, 9, 11, 5])
    each = F.cross_entropy(logits, targets, reduction="none")
    found, of_seen = weighted_loss(logits, targets, torch.tensor([3, 9]), 4.0)
    torch.testing.assert_close(found, (4 * each[[0, 2, 3]].sum() + each[[1, 4, 5]].sum()) / 15)
    torch.testing.assert_close(of_seen, each[[0, 2, 3]].mean())
    torch.testing.assert_close(weighted_loss(logits, targets, torch.tensor([3]), 1.0)[0], each.mean())


def test_a_resumed_vision_stage_is_the_uninterrupted_one(taught, tmp_path, monkeypatch):
    monkeypatch.setattr(vision_stage, "CHECKED", 3)
    small = {"scenes": 20, "teacher": taught, "pictures": 2, "films": 2, "precision": "fp32"}
    assert train_vision(tmp_path / "one", 3, **small) == 3
    assert train_vision(tmp_path / "two", 3, stop_at=2, **small) == 2
    assert train_vision(tmp_path / "two", 3, **small) == 3
    one, two = (torch.load(tmp_path / n / "vision" / "state.pt", weights_only=True) for n in ("one", "two"))
    assert one["step"] == two["step"] == 3 and len(one["model"]) > 50
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    last = json.loads((tmp_path / "two" / "vision" / "log.jsonl").read_text().splitlines()[-1])
    assert {"picture_kind0", "film_kind1", "film_count1", "picture_table", "film_taught"} <= set(last)


def _read_both(
    tower: dict[str, torch.Tensor], visual: object, taught: teacher.Teacher
) -> tuple[torch.Tensor, ...]:
    """Rows of a picture by the tower of a vision stage and by the one that a model took from it."""
    learned = build_tower(0)
    learned.load_state_dict({n.removeprefix("tower."): p for n, p in tower.items() if n.startswith("tower.")})
    pixels = patches(np.stack([[model_picture(0, 3, SIDE)] * FRAMES]))
    with torch.no_grad():
        return encode(learned, pixels), encode(visual, pixels)


@pytest.mark.slow  # trainings of other recipes are resumed in every run
def test_a_resumed_training_is_the_uninterrupted_one(vision, taught, brief, tmp_path):
    assert LanguageStage(3, **SMALL).train(tmp_path / "one", tmp_path / "data", vision, taught) == 3
    assert (
        LanguageStage(3, stop_at=2, **SMALL).train(tmp_path / "two", tmp_path / "data", vision, taught) == 2
    )
    assert LanguageStage(3, **SMALL).train(tmp_path / "two", tmp_path / "data", vision, taught) == 3
    one, two = (torch.load(tmp_path / n / "state.pt", weights_only=True) for n in ("one", "two"))
    assert one["step"] == two["step"] == 3
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    assert not any(name.startswith("model.visual.") for name in one["model"])
    tower = torch.load(vision, weights_only=True)["model"]
    visual = Qwen25VL.open(tmp_path / "two" / "model").model.model.visual
    turned = ("merger.mlp.2.weight", "merger.mlp.2.bias")
    for name, value in visual.state_dict().items():
        assert name in turned or torch.equal(tower[f"tower.{name}"].half().float(), value)
    rows, raw = _read_both(tower, visual, taught)
    assert torch.allclose(raw, rows @ torch.linalg.inv(taught._turn) + taught._mean, atol=0.05)
    last = json.loads((tmp_path / "two" / "log.jsonl").read_text().splitlines()[-1])
    figures = {"facts", "answers", "early_exit_3_alpha", "film_answers", "story_facts", "pair_answers"}
    assert figures | {
        "caption",
        "caption_seen",
        "story",
        "film_answer",
        "pair_answer",
        "answer",
        "roll_call",
    } <= set(last)
    with pytest.raises(OptionError, match=rf"trained with lr {LanguageStage.lr}, not 0\.001"):
        LanguageStage(3, lr=1e-3, **SMALL).train(tmp_path / "two", tmp_path / "data", vision, taught)


@pytest.mark.slow  # trainings of other recipes are resumed in every run
def test_the_last_stage_goes_on_from_a_training_and_is_resumed_alike(vision, taught, brief, tmp_path):
    data = tmp_path / "data"
    LanguageStage(2, **SMALL).train(tmp_path / "first", data, vision, taught)
    last = partial(LanguageStage, 3, start=tmp_path / "first" / "state.pt", **SMALL)
    assert last().train(tmp_path / "one", data, vision, taught) == 3
    assert last(stop_at=1).train(tmp_path / "two", data, vision, taught) == 1
    assert last().train(tmp_path / "two", data, vision, taught) == 3
    first, one, two = (
        torch.load(tmp_path / n / "state.pt", weights_only=True)["model"] for n in ("first", "one", "two")
    )
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert max((one[name] - value).abs().max() for name, value in first.items()) > 1e-4
    line = json.loads((tmp_path / "one" / "log.jsonl").read_text().splitlines()[-1])
    assert {"caption", "film_call", "pair_answer"} <= set(line)  # everything, from its first step on
    save_mean(
        tmp_path / "first" / "state.pt", tmp_path / "one" / "state.pt", vision, taught, tmp_path / "mean"
    )
    mean, own = (Qwen25VL.open(tmp_path / n).model.state_dict() for n in ("mean", "one/model"))
    for name, value in mean.items():
        wanted = (first[name] + one[name]) / 2 if name in first else own[name]
        torch.testing.assert_close(value, wanted, atol=2e-3, rtol=2e-3)


def test_a_layer_that_is_left_out_gives_what_it_gets(captioner):
    chances = rates(12)
    assert chances[0] == 0 and chances[-1] == MOST and np.allclose(np.diff(chances), MOST / 11)
    rows, prompts = torch.randn(1, *captioner.shape), padded([captioner.prompt_ids("what do you see?")])
    targets = padded(captioner.text_ids(["nothing at all"]))
    with torch.no_grad():
        third, last = map(captioner.head, captioner.layer_rows(rows, prompts, targets, (3, 12)).values())
        with without(captioner.layers, np.arange(12) >= 3):
            assert torch.equal(captioner.logits(rows, prompts, targets), third)
        assert torch.equal(captioner.logits(rows, prompts, targets), last)
    assert not torch.allclose(third, last, atol=1e-2)


@pytest.mark.slow
def test_a_carried_training_goes_on_elsewhere(tmp_path, brief, few_checks, monkeypatch, capsys):
    words = (
        "--vision-steps 2 --vision-scenes 20 --pictures 6 --pairs 4 --films 12 --captions 2 --step-pairs 2"
    )
    words += " --step-films 2 --scenes 4 --threads 1 --precision fp32 --steps 3 --last-steps 2"

    def run(*further: str) -> None:
        monkeypatch.setattr("sys.argv", ["recipe", *words.split(), *further])
        recipe.main()

    home, bag, away = (tmp_path / name for name in ("home", "bag", "away"))
    run("--out", str(home), "--stop-at", "2")
    size = pack(home, bag)
    states = {path.relative_to(home): path for path in home.rglob("state.pt")}
    assert size < 0.55 * sum(path.stat().st_size for path in states.values()) and len(states) == 2
    for name, path in states.items():
        whole, carried = (torch.load(p, weights_only=True) for p in (path, bag / name))
        assert whole["step"] == carried["step"] == 2
        for key, value in whole["model"].items():
            torch.testing.assert_close(carried["model"][key].float(), value, atol=1e-6, rtol=1e-3)
    run("--out", str(away), "--begin-with", str(bag))
    assert "3 of 3 steps" in capsys.readouterr().out
    steps = [json.loads(line)["step"] for line in (away / "log.jsonl").read_text().splitlines()]
    assert steps == [2, 3]  # the third step only
    last = torch.load(away / "last" / "state.pt", weights_only=True)
    assert last["step"] == 2 and last["settings"]["start"] == digest(away / "state.pt")
    recipe_of = json.loads((away / "final" / "recipe.json").read_text())
    assert [line["step"] for line in recipe_of["last_curve"]] == [2] and "vision_curve" in recipe_of
    assert (away / "evaluation.json").exists()
    assert (
        torch.load(away / "state.pt", weights_only=True)["model"]["model.language_model.norm.weight"].dtype
        == torch.float32
    )
    with pytest.raises(OptionError, match="holds a state of its own"):
        run("--out", str(away), "--begin-with", str(bag))
    with pytest.raises(OptionError, match="no state"):
        run("--out", str(tmp_path / "new"), "--begin-with", str(tmp_path))
    with pytest.raises(OptionError, match="exists"):
        pack(home, bag)
    (home / "state.pt").unlink()  # the machine went before the language model had begun
    pack(home, tmp_path / "first")
    assert [path.parent.name for path in (tmp_path / "first").rglob("state.pt")] == ["vision"]
    begin_with(tmp_path / "first", tmp_path / "later")
    assert torch.load(tmp_path / "later/vision/state.pt", weights_only=True)["step"] == 2
    with pytest.raises(OptionError, match="holds a state of its own"):
        begin_with(bag, tmp_path / "later")
    (home / "vision/state.pt").unlink()
    with pytest.raises(OptionError, match="no state"):
        pack(home, tmp_path / "nothing")


def test_rows_of_films_and_pairs_are_those_of_their_pictures(captioner, tmp_path):
    stage = LanguageStage(1, pictures=2, pairs=3, films=4)
    rows = stage._rows(captioner, tmp_path, "x", lambda: False)
    assert rows is not None and rows["pictures"].shape == (4, 64, 128)
    scene = sample_pair(0, TRAIN[2]).scenes[1]
    second = captioner.rows(resized(scene, SIDE)[None])[0].half()
    assert torch.allclose(torch.tensor(rows["pairs"][2, 64:]), second, atol=1e-2)
    film = film_rows(captioner, 0, TRAIN[3])
    assert torch.allclose(torch.tensor(rows["films"][3, : len(film)]), film.half(), atol=1e-2)
    assert not rows["films"][3, len(film) :].any()
    assert stage._rows(captioner, tmp_path, "x", lambda: True) is None


def test_the_folder_is_one_of_the_family(folder, captioner):
    checkpoint = open_checkpoint(str(folder))
    family = family_for(checkpoint)
    assert family.name == "qwen2.5-vl"
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
        "tokenizer.json", "tokenizer_config.json", "video_preprocessor_config.json",
    }  # fmt: skip
    assert sum(p.stat().st_size for p in folder.iterdir()) < 8_000_000
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    assert (text["num_hidden_layers"], text["num_attention_heads"], text["num_key_value_heads"]) == (12, 4, 2)
    assert vision["fullatt_block_indexes"] == [1, 3] and vision["depth"] == 4
    assert captioner.tokenizer.convert_tokens_to_ids(END) == text["eos_token_id"]
    loaded = Qwen25VL.open(folder).model.state_dict()
    assert all(torch.equal(v.half().float(), loaded[n]) for n, v in captioner.model.state_dict().items())
    assert captioner_of("Qwen2_5_VLForConditionalGeneration") is Qwen25VL
    assert all(kind.model_class.__name__ == name for name, kind in CAPTIONERS.items())


@pytest.mark.parametrize("side", [96, 224, 384, 500])
def test_a_square_picture_of_any_size_has_64_rows(folder, side):
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    picture = Image.fromarray(render(sample_scene(0, HELDOUT[3]), side))
    found = processor(images=picture, return_tensors="pt")
    assert found["image_grid_thw"].tolist() == [[1, 16, 16]]
    if side == 384:
        ours = patches(np.repeat(model_picture(0, HELDOUT[3], SIDE)[None, None], FRAMES, 1))[0]
        assert torch.allclose(found["pixel_values"], ours, atol=1e-4)


@pytest.mark.slow  # trainings of other recipes are resumed in every run
def test_a_bundle_gives_the_tokens_of_the_model(folder, tmp_path):
    """A picture, two pictures and a film through build and run, as the recipe's own loop answers."""
    build_bundle(BuildRequest(model=str(folder), output=tmp_path / "bundle", parity=False))
    stored = Qwen25VL.open(folder)
    pair = [resized(scene, 384) for scene in sample_pair(0, 7).scenes]
    film = sample_film(0, next(i for i in TRAIN if sample_film(0, i).count == 6))
    frames = [Image.fromarray(resized(frame, 384)) for frame in film.frames]
    cases = (
        (PICTURE, {"image": Image.fromarray(pair[0])}, pair[:1], "describe the scene"),
        (PAIR, {"images": [Image.fromarray(p) for p in pair]}, pair, "what differs?"),
        (film_media(6), {"video": Video(frames, fps=2.0)}, None, "what moved?"),
    )
    for media, given, pictures, prompt in cases:
        if pictures is None:
            rows = film_rows(stored, 0, film.scene.index)[None]
        else:
            small = [Image.fromarray(p).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for p in pictures]
            rows = stored.rows(np.stack([np.asarray(p) for p in small])).flatten(0, 1)[None]
        own = stored.answering(media)
        expected = own.speak(rows, padded([own.prompt_ids(prompt)]), 12)[0]
        with Session.load(tmp_path / "bundle") as session:
            found = session.generate(prompt=prompt, max_new_tokens=12, **given)
        assert list(found.tokens) == expected, media


@pytest.mark.slow
def test_drafts_of_a_model_that_reads_pictures_among_its_rows(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_drafts, "GenerationOptions", lambda longest: GenerationOptions(12))
    monkeypatch.setattr(tiny_drafts, "LONGEST", 12)
    monkeypatch.setenv("VLMEXPORT_CACHE", str(tmp_path / "cache"))
    work, out = tmp_path / "work", tmp_path / "drafts"
    assert len(tiny_drafts.prepare(str(folder), work, captions=4, heldout=2).answers.train) == 4 + 4
    forms = Qwen25VL.forms()
    assert forms == ("scenes", "scenes-questions", "films", "films-questions", "pairs-questions")
    workshop = tiny_drafts.prepare(str(folder), work, captions=4, heldout=2, forms=forms)
    assert len(workshop.answers.train) == 5 * 4 and len(workshop.answers.validation) == 2 * 4
    made = tiny_drafts.make_imitation(workshop, work, out, 2)
    made += tiny_drafts.make_heads(workshop, work, out, 2)
    made += tiny_drafts.make_layers(workshop, work, out, 4, 4)
    told = tiny_drafts.measure(workshop, made)
    assert list(told) == ["n3", "n6", "medusa", "eagle", "vispec"]
    for name, figures in told.items():
        draft = open_draft(out / name)
        assert draft.evaluation["heldout"] == figures and len(draft.evaluation) > 1
        assert figures["data"] == " + ".join(f"{form}:heldout:2" for form in forms)
        assert list(figures["parts"]) == list(forms)
        assert figures["tokens"] == sum(part["tokens"] for part in figures["parts"].values()) > 20
        alphas = [part["alpha"] for part in figures["parts"].values()]
        assert min(alphas) <= figures["alpha"] <= max(alphas)
        assert ("early_exit" in figures) == (name in ("n3", "n6"))
    stage = json.loads((out / "vispec" / "draft.json").read_text())["provenance"]["options"]
    assert stage["stage"] == 2 and stage["start_from"].endswith(
        tiny_drafts.run_name("vispec", workshop.target) + "-stage-1"
    )


def test_checks_of_films_and_pairs(captioner, brief, monkeypatch):
    span = VALIDATION[:4]
    found = evaluate_views(captioner, 0, span)
    assert set(captioner.further_musts()) <= set(found)
    assert all(0 <= found[n] <= 1 for n in ("story_facts", "film_answers", "film_wrong", "pair_answers"))
    checks = ViewChecks(captioner, 0, span)
    films = [film for several in checks.films.values() for film in several]
    assert sorted(f.scene.index for f in films) == list(span)
    grey = ViewChecks(captioner, 0, span, grey=True)
    assert all((rows[0, :64] == rows[0, 64:128]).all() for rows in grey.film_rows.values())
    assert not torch.equal(grey.pair_rows, checks.pair_rows)
    # With what is true as the model's answers, the figures say so.
    told = {f: [tell_film(film).text for film in several] for f, several in checks.films.items()}
    monkeypatch.setattr(
        ViewChecks,
        "stories",
        lambda self: [
            (t, film, films[0])
            for f, several in self.films.items()
            for t, film in zip(told[f], several, strict=True)
        ],
    )
    assert checks.figures()["story_facts"] == 1.0
    assert Checks(captioner, 0, span).figures()["facts"] <= 1


@pytest.mark.slow
def test_one_command_makes_a_model_with_its_record_and_evaluation(tmp_path, brief, few_checks, monkeypatch):
    words = [
        "--vision-steps",
        2,
        "--vision-scenes",
        20,
        "--pictures",
        6,
        "--pairs",
        4,
        "--films",
        12,
        "--steps",
        2,
        "--last-steps",
        2,
    ]
    words += ["--captions", 2, "--step-pairs", 2, "--step-films", 2, "--scenes", 4, "--threads", 1]
    monkeypatch.setattr(
        "sys.argv", ["recipe", "--out", str(tmp_path), "--precision", "fp32", *map(str, words)]
    )
    recipe.main()
    record = json.loads((tmp_path / "final" / "recipe.json").read_text())
    assert record["command"].endswith("tiny_qwen2_5_vl") and record["curve"][-1]["step"] == 2
    assert record["vision_curve"][-1]["step"] == 2
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["scenes"] == 4 and not found["musts"]["film_answers"]["met"]
    assert {"film_answers_by_type", "story_perplexity", "pair_answers_by_type", "film_grey"} <= set(found)
