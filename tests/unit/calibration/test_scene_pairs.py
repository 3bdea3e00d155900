"""Pairs of pictures: one change between two scenes, and questions that need to know which picture is which."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator

from vlmexport.calibration.data.scenes import HELDOUT, TRAIN, mirror
from vlmexport.calibration.data.scenes.pair import (
    CHANGES,
    PAIR_QUESTIONS,
    Pair,
    ask_pair,
    pair_answer_value,
    pair_facts,
    sample_pair,
)
from vlmexport.calibration.data.scenes.vocabulary import UNSEEN


def _pairs(count: int, *spans: range) -> Iterator[Pair]:
    for span in spans or (TRAIN, HELDOUT):
        for index in span[:count]:
            yield sample_pair(0, index)


def test_texts_are_unchanged():
    """Models are trained on these words."""
    texts = "\n".join(f"{ask_pair(p, v).text} {ask_pair(p, v).answer}" for v in (0, 7) for p in _pairs(40))
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "51625ad107a03b49"


def test_two_scenes_differ_in_one_thing():
    changes = Counter()
    for pair in _pairs(300, TRAIN):
        before, after = reversed(pair.scenes) if pair.swapped else pair.scenes
        changes[pair.change] += 1
        assert all((o.colour, o.kind) not in UNSEEN for o in after.objects)
        if pair.change == "mirrored":
            assert after == mirror(before)
            continue
        gone = [o for o in before.objects if o not in after.objects]
        assert gone == [before.objects[pair.place]]
        if pair.change == "missing":
            assert len(after.objects) == len(before.objects) - 1
            continue
        old, new = gone[0], after.objects[pair.place]
        assert old.kind == new.kind and old.x == new.x
        assert (old.colour != new.colour, old.lane != new.lane) == (
            pair.change == "colour",
            pair.change == "lane",
        )
    assert set(changes) == set(CHANGES) and min(changes.values()) > 40


def test_answers_are_true():
    kinds: Counter[str] = Counter()
    for variant in range(3):
        for pair in _pairs(200):
            asked = ask_pair(pair, variant)
            kinds[asked.kind] += 1
            assert pair_answer_value(asked.kind, asked.answer) == asked.value, asked
            assert asked.value in pair_facts(pair).values() and asked.nats > 0
    assert set(kinds) == set(PAIR_QUESTIONS) and min(kinds.values()) > 30
    assert pair_answer_value("holds", "the first, or the second") is None
    assert pair_answer_value("differs", "the ball and the cup") is None


def test_the_order_of_the_pictures_decides():
    """Exchanged pictures exchange the answers that name one."""
    turned = {"first": "second", "second": "first"}
    seen: Counter[str] = Counter()
    for pair in _pairs(150):
        other = Pair((pair.scenes[1], pair.scenes[0]), pair.change, pair.place, not pair.swapped)
        there = pair_facts(other)
        for (kind, *names), value in pair_facts(pair).items():
            if kind.startswith("colour in"):
                name = kind.split()[-1]
                assert there[(f"colour in {turned[name]}", *names)] == value
            elif (kind, *names) in there:  # what is in neither is chosen by the first picture
                assert there[(kind, *names)] == turned.get(value, value), kind
                seen[value] += 1
    assert min(seen[value] for value in ("first", "second", "both", "neither")) > 20


def test_no_answer_is_the_usual_one():
    values = defaultdict(Counter)
    for variant in range(3):
        for pair in _pairs(400, TRAIN):
            asked = ask_pair(pair, variant)
            values[asked.kind][asked.value] += 1
    assert all(max(c.values()) / c.total() < 0.55 for c in values.values())
