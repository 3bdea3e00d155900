"""The scenes: deterministic, disjoint splits, readable captions, and no game for text alone."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from vlmexport.calibration.workshop.scenes import (
    DESCRIBE,
    HELDOUT,
    TRAIN,
    VALIDATION,
    caption,
    mirror,
    parse_caption,
    questions,
    render,
    sample_scene,
    score,
    split_of,
    total_accuracy,
)
from vlmexport.calibration.workshop.scenes.text_stats import NgramModel, prompt_lookup_tau
from vlmexport.calibration.workshop.scenes.vocabulary import COLOURS, KINDS, UNSEEN


@lru_cache(maxsize=1)
def _tokenizer():
    transformers = pytest.importorskip("transformers")
    assert transformers
    from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.tokenizer import build_tokenizer

    return build_tokenizer()


def _ids(indices) -> list[list[int]]:
    return _tokenizer()([caption(sample_scene(0, i)) for i in indices])["input_ids"]


def test_world_is_rich_enough():
    assert len(KINDS) >= 8
    assert len(COLOURS) == 8
    scenes = [sample_scene(0, i) for i in TRAIN[:300]]
    assert {len(s.objects) for s in scenes} == {2, 3, 4, 5}
    assert len({s.table for s in scenes}) == 6


def test_same_arguments_give_the_same_scene():
    first, again = sample_scene(3, 17), sample_scene(3, 17)
    assert first == again
    assert caption(first) == caption(again)
    assert questions(first) == questions(again)
    assert np.array_equal(render(first, 96), render(again, 96))
    assert sample_scene(4, 17) != first


@pytest.mark.parametrize("size", [96, 384, 401])
def test_render_shape(size):
    picture = render(sample_scene(0, 5), size)
    assert picture.shape == (size, size, 3)
    assert picture.dtype == np.uint8


def test_render_refuses_tiny_pictures():
    with pytest.raises(ValueError, match="at least 32"):
        render(sample_scene(0, 5), 16)


def test_every_object_is_visible():
    for index in TRAIN[:20]:
        scene = sample_scene(0, index)
        whole = render(scene, 384).astype(int)
        for position in range(len(scene.objects)):
            rest = replace(scene, objects=scene.objects[:position] + scene.objects[position + 1 :])
            changed = np.abs(whole - render(rest, 384).astype(int)).max(-1) > 12
            assert changed.mean() > 0.002, (index, position)


def test_splits_are_disjoint():
    assert not set(TRAIN) & set(VALIDATION)
    assert TRAIN.stop <= VALIDATION.start
    assert VALIDATION.stop <= HELDOUT.start
    assert [split_of(s.start) for s in (TRAIN, VALIDATION, HELDOUT)] == ["train", "validation", "heldout"]
    with pytest.raises(ValueError, match="outside every split"):
        split_of(HELDOUT.stop)


def test_unseen_pairs_only_in_heldout():
    for span in (TRAIN, VALIDATION):
        for index in span[:800]:
            scene = sample_scene(0, index)
            assert not scene.unseen
            assert not {(o.colour, o.kind) for o in scene.objects} & UNSEEN
    flagged = [s for s in (sample_scene(0, i) for i in HELDOUT[:800]) if s.unseen]
    assert 100 < len(flagged) < 500
    assert {(s.objects[i].colour, s.objects[i].kind) for s in flagged for i in s.unseen} == UNSEEN


def test_parser_recovers_every_fact():
    types = ("object", "colour", "size", "pattern", "relation", "setting")
    for index in [*TRAIN[:700], *HELDOUT[:700]]:
        scene = sample_scene(0, index)
        found = score(caption(scene), scene)
        for name in types:
            assert found.right[name] == found.true[name] == found.claimed[name], (index, name, caption(scene))
        assert found.right["unseen"] == len(scene.unseen)


def test_score_punishes_wrong_and_invented_facts():
    scene = sample_scene(0, 2)
    text = caption(scene)
    colour = scene.objects[0].colour
    other = next(c for c in COLOURS if c not in text)
    assert score(text.replace(colour, other, 1), scene).accuracy("colour") < 1
    assert score(text + " right beside it sits a plain big red mug.", scene).accuracy() < 1
    assert score("", scene).accuracy() == 0
    assert parse_caption("no such words at all").objects == ()


def test_captions_of_other_scenes_score_low():
    scenes = [sample_scene(0, i) for i in HELDOUT[:300]]
    assert total_accuracy(score(caption(a), b) for a, b in itertools.pairwise(scenes)) <= 0.25


def test_mirror_is_its_own_inverse():
    for index in TRAIN[:50]:
        scene = sample_scene(0, index)
        assert caption(mirror(mirror(scene))) == caption(scene)
        assert score(caption(mirror(scene)), mirror(scene)).accuracy() == 1


def test_questions_have_visible_short_answers():
    for index in TRAIN[:200]:
        scene = sample_scene(0, index)
        for item in questions(scene):
            assert 1 <= len(item.answer.split()) <= 3
            if item.kind == "colour":
                kind = re.search(r"the (\w+)\?", item.text)[1]
                assert [o.colour for o in scene.objects if o.kind == kind] == [item.answer]
            if item.kind == "exists":
                colour, kind = re.search(r"a (\w+) (\w+)\?", item.text).groups()
                present = any((o.colour, o.kind) == (colour, kind) for o in scene.objects)
                assert item.answer == ("yes" if present else "no")


def test_caption_lengths():
    lengths = [len(ids) for ids in _ids([*TRAIN[:1500], *HELDOUT[:1500]])]
    assert min(lengths) >= 30
    assert max(lengths) <= 80


def test_text_alone_predicts_little():
    model = NgramModel(_ids(TRAIN[:4000]), order=5)
    assert model.perplexity(_ids(VALIDATION[:400])) >= 2.5


def test_prompt_lookup_finds_little():
    prompt = _tokenizer()(DESCRIBE)["input_ids"]
    texts = _ids(HELDOUT[:300])
    cycles = sum(len(t) / prompt_lookup_tau(prompt, t) for t in texts)
    assert sum(map(len, texts)) / cycles <= 1.6


def test_prompt_lookup_simulation_counts_cycles():
    assert prompt_lookup_tau([9], [1, 2, 3, 4]) == 1.0
    # 1 2 3 | 1 (nothing before it is followed by it) | then "2 3 1 2 3" is copied.
    assert prompt_lookup_tau([9], [1, 2, 3, 1, 2, 3, 1]) == pytest.approx(7 / 5)


def test_ngram_probabilities_sum_to_one():
    model = NgramModel([[1, 2, 3], [1, 2, 4]], order=3)
    vocabulary = [*model.vocabulary, 99]
    assert sum(model.probability([1, 2], t) for t in vocabulary) == pytest.approx(1.0)
    assert model.probability([1, 2], 3) == pytest.approx(model.probability([1, 2], 4))
