"""The scenes: deterministic, disjoint splits, every object visible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from vlmexport.calibration.data.scenes import (
    HELDOUT,
    TRAIN,
    VALIDATION,
    mirror,
    render,
    sample_scene,
    split_of,
    tell,
)
from vlmexport.calibration.data.scenes.text_stats import NgramModel, prompt_lookup_tau
from vlmexport.calibration.data.scenes.vocabulary import COLOURS, KINDS, UNSEEN


def test_world_is_rich_enough():
    assert len(KINDS) >= 8
    assert len(COLOURS) == 8
    scenes = [sample_scene(0, i) for i in TRAIN[:300]]
    assert {len(s.objects) for s in scenes} == {2, 3, 4, 5}
    assert len({s.table for s in scenes}) == 6


def test_same_arguments_give_the_same_scene():
    first, again = sample_scene(3, 17), sample_scene(3, 17)
    assert first == again
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


def test_prompt_lookup_simulation_counts_cycles():
    assert prompt_lookup_tau([9], [1, 2, 3, 4]) == 1.0
    # 1 2 3 | 1 (nothing before it is followed by it) | then "2 3 1 2 3" is copied.
    assert prompt_lookup_tau([9], [1, 2, 3, 1, 2, 3, 1]) == pytest.approx(7 / 5)


def test_ngram_probabilities_sum_to_one():
    model = NgramModel([[1, 2, 3], [1, 2, 4]], order=3)
    vocabulary = [*model.vocabulary, 99]
    assert sum(model.probability([1, 2], t) for t in vocabulary) == pytest.approx(1.0)
    assert model.probability([1, 2], 3) == pytest.approx(model.probability([1, 2], 4))


def test_mirror_is_its_own_inverse():
    for index in TRAIN[:50]:
        scene = sample_scene(0, index)
        assert tell(mirror(mirror(scene))) == tell(scene) != tell(mirror(scene))
