"""Loaders: what they read, and how they speak of bad records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vlmexport.calibration.data import ImageRef, load_records
from vlmexport.calibration.data.scenes import HELDOUT, render
from vlmexport.calibration.data.scenes.film import sample_film
from vlmexport.calibration.data.scenes.pair import sample_pair
from vlmexport.runtime.common.errors import ImageError, InputError, OptionError
from vlmexport.runtime.images.video import Video


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (10, 200, 30)).save(path)
    return path


def test_jsonl_skips_bad_lines_and_names_them(tmp_path: Path, capsys):
    picture(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    lines = [
        '{"prompt": "what?", "image": "a.png", "answer": "a cup"}',
        "{not json",
        '{"prompt": 3}',
        "",
        '{"answer": "without a request"}',
        '{"prompt": "x", "image": "missing.png"}',
        '{"prompt": "x", "image": "broken.png"}',
        "[]",
        '{"image": "a.png"}',
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    found = load_records(str(path), prompt="describe")
    assert [(r.prompt, r.answer) for r in found] == [("what?", "a cup"), ("describe", None)]
    assert found[0].image is not None and found[0].image.load().size == (8, 6)
    assert [p.split(": ")[0] for p in found.problems] == [f"{path}:{n}" for n in (2, 3, 5, 6, 7, 8)]
    assert "prompt" in found.problems[1] and "missing.png" in found.problems[3]
    assert capsys.readouterr().err.count("skipped ") == 6
    with pytest.raises(InputError, match=r"data\.jsonl:2.*--strict"):
        load_records(str(path), strict=True)


def test_bytes_that_are_no_text_are_a_bad_record(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "fine"}\n')
    found = load_records(str(path))
    assert len(found) == 1 and len(found.problems) == 1


def test_coco_takes_the_first_caption(tmp_path: Path):
    picture(tmp_path / "images" / "1.jpg")
    document = {
        "images": [
            {"id": 1, "file_name": "1.jpg"},
            {"id": 2, "file_name": "2.jpg"},
            {"id": 3, "file_name": "1.jpg"},
            {"id": 4},
        ],
        "annotations": [
            {"image_id": 1, "caption": " a cup "},
            {"image_id": 1, "caption": "another"},
            {"image_id": 2, "caption": "gone"},
            {"image_id": 1},
        ],
    }
    path = tmp_path / "captions.json"
    path.write_text(json.dumps(document))
    found = load_records(f"coco:{path},{tmp_path / 'images'}", prompt="describe")
    assert [(r.key, r.answer, r.prompt) for r in found] == [("1", "a cup", "describe")]
    assert [p.removeprefix(f"{path}: ").split(":")[0] for p in found.problems] == [
        "annotations[3]",
        "images[1]",
        "images[2]",
        "images[3]",
    ]


def test_karpathy_selects_the_split(tmp_path: Path):
    for name in ("a", "b"):
        picture(tmp_path / "val2014" / f"{name}.jpg")
    entry = {"filepath": "val2014", "sentences": [{"raw": "a bowl"}, {"raw": "b"}]}
    document = {
        "images": [
            {**entry, "filename": "a.jpg", "split": "test"},
            {**entry, "filename": "b.jpg", "split": "train"},
            {**entry, "filename": "b.jpg", "split": "test", "sentences": []},
        ]
    }
    path = tmp_path / "dataset_coco.json"
    path.write_text(json.dumps(document))
    found = load_records(f"coco:{path},{tmp_path},test")
    assert [(r.key, r.answer) for r in found] == [("a.jpg", "a bowl")]
    assert len(found.problems) == 1 and "images[2]" in found.problems[0]
    assert len(load_records(f"coco:{path},{tmp_path}")) == 2


def test_image_folder(tmp_path: Path):
    picture(tmp_path / "b.png")
    picture(tmp_path / "deep" / "a.jpg")
    (tmp_path / "c.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no picture")
    found = load_records(f"images:{tmp_path}", prompt="p")
    assert [(r.key, r.prompt, r.answer) for r in found] == [("b.png", "p", None), ("deep/a.jpg", "p", None)]
    assert len(found.problems) == 1


def test_scenes_come_in_disjoint_splits_and_repeat():
    train, held = load_records("scenes:train:3"), load_records("scenes:heldout:3")
    assert not {r.key for r in train} & {r.key for r in held}
    assert train.records == load_records("scenes:train:4", limit=3).records
    assert train.identity() != held.identity()
    assert train[0].image is not None and train[0].image.load().size == (384, 384)
    questions = load_records("scenes-questions:validation:2")
    assert all(q.prompt != t.prompt and q.answer for q, t in zip(questions, train, strict=False))


def test_scenes_beside_those_of_the_target():
    """An offset or another seed gives scenes that a target trained on the first ones has not seen."""
    first = load_records("scenes:train:6")
    later = load_records("scenes:train:2:offset=4")
    assert later.records == first.records[4:]
    other = load_records("scenes:train:6:seed=3")
    assert not {r.answer for r in other} & {r.answer for r in first} and other[0].key == "scene-3.0"
    both = load_records("scenes:train:2:offset=1:seed=3")
    assert both.records == other.records[1:3]
    assert load_records("scenes-questions:train:offset=5:seed=3", limit=1)[0].image == other[5].image
    assert (
        load_records("scenes:train:offset=999999")[0].image
        == load_records("scenes:train:1:offset=999999")[0].image
    )


def test_several_sets_are_joined(tmp_path: Path):
    joined = load_records(["scenes:train:2", "scenes:train:2"])
    assert [r.key for r in joined] == ["0/scene-0", "0/scene-1", "1/scene-0", "1/scene-1"]
    assert joined.name == "scenes:train:2 + scenes:train:2"
    assert [r.key for r in load_records(["scenes:train:3", "images:/nowhere"], limit=2)] == [
        "0/scene-0",
        "0/scene-1",
    ]
    for name, writer in (("a", "x"), ("b", "y")):
        (tmp_path / name).mkdir()
        meta = {"target": {"name": writer, "fingerprint": writer}, "shards": 1}
        (tmp_path / name / "generated.json").write_text(json.dumps(meta))
        line = {"key": "k", "prompt": "p", "image": None, "tokens": [1, 2]}
        (tmp_path / name / "shard-00000.jsonl").write_text(json.dumps(line) + "\n")
    mixed = load_records(["scenes:train:1", str(tmp_path / "a")])
    assert mixed.generated_by == {"name": "x", "fingerprint": "x"} and mixed[1].tokens == (1, 2)
    with pytest.raises(OptionError, match="generated by 'y', other data by 'x'"):
        load_records([str(tmp_path / "a"), str(tmp_path / "b")])


def test_films_and_pairs_of_the_same_scenes():
    """Videos at their rate and lists of two pictures, told, asked about and written down as references to their scene."""
    stories, asked = (
        load_records("films:heldout:5:offset=2"),
        load_records("films-questions:heldout:5:offset=2"),
    )
    pairs = load_records("pairs-questions:heldout:5:offset=2")
    scenes = load_records("scenes:heldout:5:offset=2")
    assert (stories.task, asked.task, pairs.task) == ("captions", "exact", "exact")
    assert {r.prompt for r in stories} == {"describe what happens"} and len({r.answer for r in stories}) == 5
    keys = [r.key for one in (scenes, stories, asked, pairs) for r in one]
    assert len(set(keys)) == 20 and all(k.startswith(s.key) for s, k in zip(scenes, keys[5:10], strict=True))
    for at, (story, question, pair) in enumerate(zip(stories, asked, pairs, strict=True)):
        assert story.image == question.image and story.image is not None and pair.image is not None
        film, pictures = story.image.load(), pair.image.load()
        seen = sample_film(0, HELDOUT[2 + at])
        assert isinstance(film, Video) and (len(film.frames), film.fps) == (seen.count, 2.0)
        want = [render(scene, 384) for scene in (*seen.frames, *sample_pair(0, HELDOUT[2 + at]).scenes)]
        for mine, theirs in zip([*film.frames, *pictures], want, strict=True):
            assert np.array_equal(np.asarray(mine), theirs)
        for ref in (story.image, pair.image):
            assert ImageRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref
    assert scenes[0].image.to_json() == {"scene": [0, HELDOUT[2]]}, "as ever"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is neither a file nor a scene"):
        ImageRef.from_json({"scene": [0, 1], "shown": "elsewhere"})


def test_captions_without_a_prompt():
    """For models that continue their prompt; all else is as it is of `scenes:`."""
    bare, asked = (
        load_records("scenes-captions:heldout:4:offset=2"),
        load_records("scenes:heldout:4:offset=2"),
    )
    assert {r.prompt for r in bare} == {""} and all(r.prompt for r in asked)
    assert [(r.key, r.image, r.answer) for r in bare] == [(r.key, r.image, r.answer) for r in asked]
    assert bare.identity() != asked.identity()


def test_every_variant_tells_the_scenes_in_other_words():
    first, other = load_records("scenes:train:5"), load_records("scenes:train:5:variant=3")
    assert [r.image for r in first] == [r.image for r in other]
    assert load_records("scenes:train:5:variant=0").records == first.records
    assert len({r.answer for records in (first, other) for r in records}) == 10
    assert [r.key for r in other] == [f"{r.key}-variant-3" for r in first]
    asked = load_records("scenes-questions:heldout:9:offset=4")
    assert [r.image for r in asked] == [r.image for r in load_records("scenes:heldout:9:offset=4")]
    assert asked.records == load_records("scenes-questions:heldout:9:offset=4").records


@pytest.mark.parametrize(
    "data",
    [
        "scenes:test",
        "scenes:train:0",
        "scenes:train:x",
        "scenes:train:3:4",
        "scenes:train:offset=",
        "nothing",
        "scenes:train:3:colour=1",
        "scenes:train:1:offset=1000000",
        "scenes:train:seed=-1",
        "scenes:train:3:form=2",
        "scenes:train:3:variant=x",
        "scenes:train:3:seed=1:seed=2",
        "coco:a",
        "images:/nowhere",
    ],
)
def test_unknown_data_is_named(data: str):
    with pytest.raises(OptionError, match=r"scenes|nothing|coco|images"):
        load_records(data)


def test_a_truncated_image_is_found_when_its_pixels_are_read(tmp_path: Path):
    path = picture(tmp_path / "a.png")
    whole = Image.effect_noise((64, 64), 90)
    whole.save(path)
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(ImageError, match=r"a\.png"):
        ImageRef(file=str(path)).load()


def test_splitting_keeps_one_record_each():
    records = load_records("scenes:train:5")
    most, rest = records.split(0.05)
    assert (len(most), len(rest)) == (4, 1)
    with pytest.raises(InputError, match="at least 2"):
        load_records("scenes:train:1").split(0.05)


def test_pictures_are_read_as_the_runtime_reads_them(tmp_path: Path):
    """Upright and over white: a draft must be trained on the pixels that the deployed model gets."""
    exif = Image.Exif()
    exif[0x0112] = 6  # a viewer turns it by 90 degrees
    Image.new("RGB", (8, 6)).save(tmp_path / "turned.jpg", exif=exif)
    assert ImageRef(file=str(tmp_path / "turned.jpg")).load().size == (6, 8)
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert ImageRef(file=str(tmp_path / "clear.png")).load().getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("given", ["", "a.png"])
def test_pictures_without_a_form_are_told_their_form(given: str, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(OptionError, match=f"^--data '.*' is given as images:{re.escape(str(tmp_path))}$"):
        load_records(str(tmp_path / given))
