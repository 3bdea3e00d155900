"""Published data sets in exactly the layouts of their files, small: what is read, and how bad entries are named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.calibration.data import ImageRef, Record, RecordSet, load_records
from vlmexport.calibration.data.formats import names, open_format
from vlmexport.calibration.data.layout import prompt_of
from vlmexport.calibration.data.reading import places as data_places
from vlmexport.runtime.common.errors import ImageError, InputError, OptionError
from vlmexport.runtime.images.video import Video

from tests.support.training_targets import make_target

ROOT = Path(__file__).resolve().parents[3]


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (10, 200, 30)).save(path, "PNG")
    return path


def document(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def places(found: RecordSet, path: Path) -> list[str]:
    """Where the bad entries are, in the file."""
    assert all(p.startswith(f"{path}:") for p in found.problems), found.problems
    return [p.removeprefix(f"{path}:").strip().split(": ")[0] for p in found.problems]


# --- captions ---


def test_coco_keeps_every_caption_as_reference(tmp_path: Path):
    picture(tmp_path / "1.jpg")
    told = [{"image_id": 1, "id": n, "caption": f"caption {n}"} for n in range(5)]
    path = document(tmp_path / "c.json", {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": told})
    found = load_records(f"coco:{path},{tmp_path}")
    assert found[0].references == tuple(f"caption {n}" for n in range(5)) and found.task == "captions"
    with pytest.raises(OptionError, match="has no splits"):
        load_records(f"coco:{path},{tmp_path},test")


@pytest.mark.parametrize("form", ["coco", "nocaps"])
def test_pictures_without_captions(form: str, tmp_path: Path):
    """COCO's image_info_test2014.json, nocaps_test_image_info.json: the official form without annotations."""
    picture(tmp_path / "COCO_test2014_000000000001.jpg")
    images = [
        {"license": 2, "file_name": "COCO_test2014_000000000001.jpg", "coco_url": "u", "height": 6, "width": 8, "id": 1},
        {"license": 2, "file_name": "gone.jpg", "coco_url": "u", "height": 6, "width": 8, "id": 2},
    ]  # fmt: skip
    path = document(tmp_path / "image_info_test2014.json", {"info": {}, "images": images, "licenses": []})
    found = load_records(f"{form}:{path},{tmp_path}", prompt="describe")
    assert [(r.key, r.prompt, r.answer, r.references) for r in found] == [("1", "describe", None, ())]
    assert places(found, path) == ["images[1]"] and "gone.jpg" in found.problems[0]
    with pytest.raises(OptionError, match=r"has no splits|unknown domain"):
        load_records(f"{form}:{path},{tmp_path},test")


def test_karpathy_joins_splits(tmp_path: Path):
    entries = []
    for name, split in (("a", "train"), ("b", "restval"), ("c", "test")):
        picture(tmp_path / "val2014" / f"{name}.jpg")
        sentences = [{"raw": f"{name} {n}.", "tokens": [name], "imgid": 0, "sentid": n} for n in range(2)]
        entries.append(
            {"filepath": "val2014", "filename": f"{name}.jpg", "split": split, "sentences": sentences}
        )
    path = document(tmp_path / "dataset_coco.json", {"images": entries, "dataset": "coco"})
    found = load_records(f"coco:{path},{tmp_path},train+restval")
    assert [(r.key, r.references) for r in found] == [
        ("a.jpg", ("a 0.", "a 1.")),
        ("b.jpg", ("b 0.", "b 1.")),
    ]


def test_nocaps_by_domain(tmp_path: Path):
    for name in "ab":
        picture(tmp_path / f"{name}.jpg")
    images = [
        {"id": 0, "file_name": "a.jpg", "domain": "in-domain", "open_images_id": "x"},
        {"id": 1, "file_name": "b.jpg", "domain": "out-domain", "open_images_id": "y"},
        {"id": 2, "file_name": "gone.jpg", "domain": "out-domain", "open_images_id": "z"},
    ]
    notes = [{"image_id": i, "id": n, "caption": f"{i} {n}"} for i in range(3) for n in range(10)]
    path = document(tmp_path / "nocaps.json", {"images": images, "annotations": notes})
    found = load_records(f"nocaps:{path},{tmp_path},out-domain", prompt="describe")
    assert [(r.key, r.prompt, len(r.references)) for r in found] == [("1", "describe", 10)]
    assert places(found, path) == ["images[2]"] and "gone.jpg" in found.problems[0]
    assert len(load_records(f"nocaps:{path},{tmp_path}")) == 2
    with pytest.raises(OptionError, match=r"unknown domain 'far'.*near-domain"):
        load_records(f"nocaps:{path},{tmp_path},far")


@pytest.mark.parametrize("kaggle", [False, True])
def test_flickr8k(kaggle: bool, tmp_path: Path):
    for name in ("1_a.jpg", "2_b.jpg"):
        picture(tmp_path / name)
    lines = ["image,caption"] if kaggle else []
    for name in ("1_a.jpg", "2_b.jpg", "3_gone.jpg"):
        for n in range(5):
            lines.append(f'{name},"{n}, a dog ."' if kaggle else f"{name}#{n}\t{n}, a dog .")
    lines.append("no caption at all")
    path = document(tmp_path / "Flickr8k.token.txt", "\n".join(lines) + "\n")
    found = load_records(f"flickr8k:{path},{tmp_path}", prompt="p")
    assert [(r.key, r.prompt, r.answer, len(r.references)) for r in found] == [
        ("1_a.jpg", "p", "0, a dog .", 5),
        ("2_b.jpg", "p", "0, a dog .", 5),
    ]
    assert f"{path}:{len(lines)}: " in found.problems[0] and "3_gone.jpg" in found.problems[1]
    split = document(tmp_path / "Flickr_8k.testImages.txt", "2_b.jpg\nunknown.jpg\n")
    some = load_records(f"flickr8k:{path},{tmp_path},{split}")
    assert [r.key for r in some] == ["2_b.jpg"] and f"{split}:2: " in some.problems[-1]


# --- questions ---


def vqa(folder: Path) -> tuple[Path, Path]:
    picture(folder / "val2014" / "COCO_val2014_000000000042.jpg")
    questions = [
        {"image_id": 42, "question": "What is it?", "question_id": 420},
        {"image_id": 42, "question": "Where?", "question_id": 421},
        {"image_id": 43, "question": "Gone?", "question_id": 430},
        {"image_id": 42, "question": "", "question_id": 422},
    ]
    people = [
        {"answer": a, "answer_confidence": "yes", "answer_id": n}
        for n, a in enumerate(["cup"] * 9 + ["mug"], 1)
    ]
    notes = [
        {"question_id": q, "image_id": 42, "answers": people, "multiple_choice_answer": "cup",
         "question_type": "what is", "answer_type": "other"}
        for q in (420, 430)
    ]  # fmt: skip
    notes.append({"question_id": 421, "answers": [], "multiple_choice_answer": "here"})
    return (
        document(
            folder / "questions.json",
            {"questions": questions, "data_subtype": "val2014", "data_type": "mscoco"},
        ),
        document(folder / "annotations.json", {"annotations": notes}),
    )


def test_vqav2(tmp_path: Path):
    questions, notes = vqa(tmp_path)
    found = load_records(f"vqav2:{questions},{tmp_path},{notes}")
    assert [(r.key, r.prompt, r.answer) for r in found] == [("420", "What is it?", "cup")]
    assert found[0].references == ("cup",) * 9 + ("mug",) and found.task == "vqa"
    named = [p.split(": ")[1] for p in found.problems]
    assert named == ["annotations[2]", "questions[1]", "questions[2]", "questions[3]"]
    blind = load_records(f"vqav2:{questions},{tmp_path}")
    assert [(r.answer, r.references) for r in blind] == [(None, ()), (None, ())]
    with pytest.raises(InputError, match=r"annotations\[2\].*'answers'"):
        load_records(f"vqav2:{questions},{tmp_path},{notes}", strict=True)


@pytest.mark.parametrize("subtype", ["test2015", "test-dev2015"])
@pytest.mark.parametrize("inner", ["", "test2015"])
def test_the_pictures_of_test_dev_are_those_of_test(subtype: str, inner: str, tmp_path: Path):
    picture(tmp_path / inner / "COCO_test2015_000000000042.jpg")
    asked = [{"image_id": 42, "question": "What is it?", "question_id": 420}]
    path = document(tmp_path / "questions.json", {"questions": asked, "data_subtype": subtype})
    assert [r.key for r in load_records(f"vqav2:{path},{tmp_path}")] == ["420"]


def test_empty_human_answers_are_allowed(tmp_path: Path):
    """As in VQA v2's annotations: the question stays, and the blank answer is one of its ten."""
    questions, notes = vqa(tmp_path)
    known = json.loads(notes.read_text())
    known["annotations"][0]["answers"][3]["answer"] = ""
    known["annotations"][1]["answers"][3]["answer"] = None
    found = load_records(f"vqav2:{questions},{tmp_path},{document(notes, known)}")
    said = ("cup",) * 3 + ("",) + ("cup",) * 5 + ("mug",)
    assert [(r.answer, r.references) for r in found] == [("cup", said)]
    assert "annotations[1]: field 'answer' is None" in found.problems[0]


def test_a_template_is_put_around_questions(tmp_path: Path):
    questions, notes = vqa(tmp_path)
    form = f"vqav2:{questions},{tmp_path},{notes}"
    assert load_records(form, prompt="Q: {question} A:")[0].prompt == "Q: What is it? A:"
    assert load_records(form, prompt="describe")[0].prompt == "What is it?"
    bare = load_records(f"images:{tmp_path / 'val2014'}", prompt="describe {question}")
    assert bare[0].prompt == "describe"


def visdial(folder: Path) -> Path:
    picture(folder / "VisualDialog_val2018_000000000007.jpg")
    dialog = [
        {"question": 1, "answer": 0, "answer_options": [2, 0, 1], "gt_index": 1},
        {"question": 0, "answer": 2, "answer_options": [2, 1], "gt_index": 0},
    ]
    data = {
        "questions": ["is it red?", "how many?"],
        "answers": ["two", "no", "yes"],
        "dialogs": [
            {"image_id": 7, "caption": "two cups", "dialog": dialog},
            {"image_id": 7, "caption": "two cups", "dialog": [{"question": 9, "answer": 0}]},
            {"image_id": 8, "caption": "gone", "dialog": dialog},
        ],
    }
    return document(folder / "visdial_1.0_val.json", {"version": "1.0", "split": "val2018", "data": data})


def test_visdial_tells_what_was_said_before(tmp_path: Path):
    path = visdial(tmp_path)
    found = load_records(f"visdial:{path},{tmp_path}")
    first, second = found
    caption = (("user", "Describe the picture."), ("assistant", "two cups"))
    assert (first.key, first.prompt, first.answer, first.history) == ("7-1", "how many?", "two", caption)
    assert (first.choices, first.choice) == (("yes", "two", "no"), 1)
    assert second.history == (*caption, ("user", "how many?"), ("assistant", "two"))
    assert second.choices[second.choice] == second.answer == "yes"
    assert places(found, path) == ["data.dialogs[1]", "data.dialogs[2]"] and found.task == "choices"


def test_scienceqa(tmp_path: Path):
    picture(tmp_path / "test" / "1" / "image.png")
    one = {"question": "Which?", "choices": ["north", "south"], "answer": 1, "hint": "Look.", "image": "image.png",
           "split": "test", "grade": "grade2"}  # fmt: skip
    rows = {
        "1": one,
        "2": {**one, "image": None, "hint": "", "answer": 0},
        "3": {**one, "answer": 2, "image": None},
        "4": {**one, "split": "train"},
    }
    path = document(tmp_path / "problems.json", rows)
    found = load_records(f"scienceqa:{path},{tmp_path},test")
    assert [(r.key, r.prompt, r.choices, r.choice, r.answer) for r in found] == [
        ("1", "Look.\nWhich?", ("north", "south"), 1, "south"),
        ("2", "Which?", ("north", "south"), 0, "north"),
    ]
    assert found[0].image is not None and found[1].image is None
    assert places(found, path) == ["['3']"] and "none of the 2 choices" in found.problems[0]
    assert [r.key for r in load_records(f"scienceqa:{path},{tmp_path},test,images=only")] == ["1"]
    with pytest.raises(OptionError, match="images='some' is neither only nor any"):
        load_records(f"scienceqa:{path},{tmp_path},images=some")


def test_scienceqa_has_splits_that_no_problem_names(tmp_path: Path):
    one = {"question": "Which?", "choices": ["north", "south"], "answer": 1, "hint": "", "image": None}
    rows = {str(n): {**one, "split": "val" if n < 3 else "test"} for n in range(5)}
    form = f"scienceqa:{document(tmp_path / 'problems.json', rows)},{tmp_path}"
    assert [r.key for r in load_records(f"{form},val")] == ["0", "1", "2"]
    with pytest.raises(
        OptionError, match=rf"'minival' is none of train, val, test.*{tmp_path}/pid_splits.json"
    ):
        load_records(f"{form},minival")
    splits = {"val": ["0", "1", "2"], "test": ["3", "4"], "minival": ["0", "2"]}
    path = document(tmp_path / "pid_splits.json", splits)
    assert [r.key for r in load_records(f"{form},minival")] == ["0", "2"]
    assert [r.key for r in load_records(f"{form},test")] == ["3", "4"]
    with pytest.raises(OptionError, match="no split 'maxival'; it has val, test, minival"):
        load_records(f"{form},maxival")
    for damaged in ("[]", '{"val": 3}'):
        document(path, damaged)
        with pytest.raises(OptionError, match=r"pid_splits.json has no list 'val'"):
            load_records(f"{form},val")


def test_mm_vet(tmp_path: Path):
    picture(tmp_path / "v1_0.png")
    one = {
        "imagename": "v1_0.png",
        "question": "x?",
        "answer": "-1<OR>-5",
        "imagesource": "u",
        "capability": ["ocr"],
    }
    both = {**one, "answer": "a white rook<AND> a black pawn<OR>two pieces"}
    rows = {"v1_0": one, "v1_1": {"imagename": "v1_0.png"}, "v1_2": both}
    path = document(tmp_path / "mm-vet.json", rows)
    found = load_records(f"mm-vet:{path},{tmp_path}")
    assert [(r.key, r.prompt, r.answer, r.references) for r in found] == [
        ("v1_0", "x?", "-1", ("-1", "-5")),
        ("v1_2", "x?", "a white rook, a black pawn", ("a white rook, a black pawn", "two pieces")),
    ]
    assert places(found, path) == ["['v1_1']"] and "no field 'answer'" in found.problems[0]


@pytest.mark.parametrize("inner", [False, True])
def test_mme(inner: bool, tmp_path: Path):
    category = tmp_path / "colour"
    picture((category / "images" if inner else category) / "0001.jpg")
    texts = category / "questions_answers_YN" if inner else category
    texts.mkdir(exist_ok=True)
    document(texts / "0001.txt", "Is it red? Please answer yes or no.\tYes\nIs it blue?\tNo\nWhat?\tMaybe\n")
    document(texts / "0002.txt", "Gone?\tYes\n")
    found = load_records(f"mme:{tmp_path}")
    assert [(r.key, r.prompt, r.answer) for r in found] == [
        ("colour/0001/1", "Is it red? Please answer yes or no.", "Yes"),
        ("colour/0001/2", "Is it blue?", "No"),
    ]
    assert [p.split(": ")[0] for p in found.problems] == [
        f"{texts / '0001.txt'}:3",
        f"{texts / '0002.txt'}:1",
    ]


def test_textvqa(tmp_path: Path):
    picture(tmp_path / "abc.jpg")
    one = {"question_id": 34602, "image_id": "abc", "question": "what brand?", "answers": ["nokia"] * 10,
           "image_classes": ["phone"], "flickr_original_url": "u"}  # fmt: skip
    unanswered = {key: value for key, value in one.items() if key != "answers"}
    rows = [one, {**one, "image_id": "no"}, unanswered, {**one, "answers": [3.5, None]}, 7]
    path = document(tmp_path / "TextVQA_0.5.1_val.json", {"dataset_type": "val", "data": rows})
    found = load_records(f"textvqa:{path},{tmp_path}")
    assert [(r.key, r.answer, len(r.references)) for r in found] == [
        ("34602", "nokia", 10),
        ("34602", None, 0),
    ]
    assert places(found, path) == ["data[1]", "data[3]", "data[4]"]


def test_vizwiz(tmp_path: Path):
    picture(tmp_path / "VizWiz_val_00000000.jpg")
    people = [{"answer": "basil leaves", "answer_confidence": "yes"}] * 9 + [{"answer": "basil"}]
    one = {"image": "VizWiz_val_00000000.jpg", "question": "what is this?", "answers": people,
           "answer_type": "other", "answerable": 1}  # fmt: skip
    path = document(tmp_path / "val.json", [one, {**one, "answers": []}])
    found = load_records(f"vizwiz:{path},{tmp_path}")
    assert found[0].references == ("basil leaves",) * 9 + ("basil",) and found.task == "vqa"
    assert places(found, path) == ["[1]"]
    bare = {name: one[name] for name in ("image", "question")}  # as test.json is published
    blind = load_records(f"vizwiz:{document(tmp_path / 'test.json', [bare])},{tmp_path}")
    assert [(r.prompt, r.answer, r.references) for r in blind] == [("what is this?", None, ())]


def test_gqa(tmp_path: Path):
    picture(tmp_path / "2370799.jpg")
    one = {
        "imageId": "2370799",
        "question": "Is it indoors?",
        "answer": "no",
        "fullAnswer": "No, it is outdoors.",
    }
    path = document(
        tmp_path / "val_balanced_questions.json", {"201307251": one, "2": {**one, "imageId": "1"}}
    )
    found = load_records(f"gqa:{path},{tmp_path}")
    assert [(r.key, r.prompt, r.answer, r.references) for r in found] == [
        ("201307251", "Is it indoors?", "no", ("no",))
    ]
    assert places(found, path) == ["['2']"]
    bare = {"imageId": "2370799", "question": "Is it indoors?", "isBalanced": True}
    path = document(tmp_path / "submission_all_questions.json", {"201307251": bare})
    blind = load_records(f"gqa:{path},{tmp_path}")
    assert [(r.key, r.prompt, r.answer, r.references) for r in blind] == [
        ("201307251", "Is it indoors?", None, ())
    ]


SEED = {
    "answer": "B", "choice_a": "One", "choice_b": "Two", "choice_c": "Three", "choice_d": "Four",
    "data_id": "1454426_2591111986", "data_type": "image", "question": "How many?", "question_id": "101669",
    "question_type_id": 5,
}  # fmt: skip


def test_seed_has_pictures_and_videos(tmp_path: Path):
    picture(tmp_path / "1454426_2591111986")
    frames(tmp_path / "1234.webm")
    rows = [
        SEED,
        {**SEED, "data_type": "video", "data_id": "1234.webm", "answer": "D"},
        {**SEED, "answer": "E"},
    ]
    path = document(tmp_path / "SEED-Bench.json", {"questions": rows, "question_type": {}})
    found = load_records(f"seed:{path},{tmp_path},frames=2")
    assert [(r.choices[r.choice], r.answer) for r in found] == [("Two", "Two"), ("Four", "Four")]
    assert found[1].image.video.endswith("1234.webm") and len(found[1].image.load()) == 2
    assert places(found, path) == ["questions[2]"] and "'E', none of the 4 choices" in found.problems[0]
    assert len(load_records(f"seed:{path},{tmp_path},video")) == 1


def test_seed_asks_about_a_segment_of_a_film(tmp_path: Path):
    """Dimension 11 has seconds, dimension 12 frames; what lies around them is another film for the question."""
    (tmp_path / "P03").mkdir()
    film(tmp_path / "P03" / "P03_24.MP4", count=20, rate=2)
    frames(tmp_path / "P06" / "cam01" / "P06_cereals.avi", count=20)
    one = {**SEED, "data_type": "video"}
    rows = [
        {**one, "data_id": "P03/P03_24.MP4", "question_type_id": 11, "segment": [4.0, 8.0]},
        {**one, "data_id": "P06/cam01/P06_cereals.avi", "question_type_id": 12, "segment": [4, 8]},
        {**one, "data_id": "P06/cam01/P06_cereals.avi", "question_type_id": 12, "segment": [18, 166]},
        {**one, "data_id": "P06/cam01/P06_cereals.avi", "question_type_id": 12, "segment": [8, 4]},
        {**one, "data_id": "P06/cam01/P06_cereals.avi", "question_type_id": 12, "segment": [30, 40]},
        {**one, "data_id": "P06/cam01/P06_cereals.avi", "question_type_id": 11, "segment": [0.0, 2.0]},
    ]
    path = document(tmp_path / "SEED-Bench.json", {"questions": rows, "question_type": {}})
    found = load_records(f"seed:{path},{tmp_path},frames=2")
    assert places(found, path) == ["questions[3]"] and "segment [8, 4]" in found.problems[0]
    assert [grey(r) for r in found[:3]] == [[100, 140], [50, 70], [180, 190]]
    with pytest.raises(ImageError, match=r"P06_cereals.*\(30, 40\) begins behind its last frame, 19"):
        found[3].image.load()
    with pytest.raises(ImageError, match="a folder has no rate; give the file"):
        found[4].image.load()
    for image in (r.image for r in found):
        read = ImageRef.from_json(json.loads(json.dumps(image.absolute().to_json())))
        assert read == image and type(read.segment[0]) is type(image.segment[0])
    whole = RecordSet("", [replace(r, image=replace(r.image, segment=None)) for r in found])
    assert whole.identity() != found.identity()
    with pytest.raises(OptionError, match="no usable record"):
        load_records(f"seed:{path},{tmp_path}")
    with pytest.raises(InputError, match=r"segment \[4.0, 8.0\] of a film.*give the data frames=N"):
        load_records(f"seed:{path},{tmp_path}", strict=True)


def grey(record: Record) -> list[int]:
    """The level of each frame, to the nearest ten."""
    return [round(frame.getpixel((0, 0))[0], -1) for frame in record.image.load()]


# --- videos ---


def frames(folder: Path, count: int = 5) -> Path:
    """A folder of pictures stands for a video; the n-th has grey level 10 n."""
    folder.mkdir(parents=True)
    for n in range(count):
        Image.fromarray(np.full((6, 8, 3), 10 * n, np.uint8)).save(folder / f"{n}.png")
    return folder


def film(path: Path, count: int, rate: int) -> Path:
    """A file of `rate` frames a second; the n-th has grey level 10 n, but for what the codec loses."""
    av = pytest.importorskip("av", reason="writing a video needs [video]")
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for n in range(count):
            level = np.full((48, 64, 3), 10 * n, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(level, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_msvd_qa_with_and_without_a_mapping(tmp_path: Path):
    frames(tmp_path / "videos" / "mv89psg6zh4_33_46.avi")
    frames(tmp_path / "videos" / "vid3.avi")
    one = {"answer": "someone", "id": 0, "question": "who pours liquid?", "video_id": 1201}
    path = document(tmp_path / "val_qa.json", [one, {**one, "id": 1, "video_id": 3}, {**one, "video_id": 9}])
    mapping = document(tmp_path / "youtube_mapping.txt", "mv89psg6zh4_33_46 vid1201\n\none too many words\n")
    found = load_records(f"msvd-qa:{path},{tmp_path / 'videos'},{mapping}")
    assert [(r.key, Path(r.image.video).stem) for r in found] == [("0", "mv89psg6zh4_33_46"), ("1", "vid3")]
    assert found.problems[0].startswith(f"{mapping}:3: ") and found.problems[1].startswith(f"{path}: [2]: ")
    assert isinstance(found[0].image.load(), Video)
    some = load_records(f"msvd-qa:{path},{tmp_path / 'videos'},frames=2")[0]
    assert [f.getpixel((0, 0))[0] for f in some.image.load()] == [10, 30], "the middles of both halves"
    assert type(some.image).from_json(some.image.to_json()) == some.image
    with pytest.raises(OptionError, match="frames='0'"):
        load_records(f"msvd-qa:{path},{tmp_path / 'videos'},frames=0")


# --- conversations ---


CONVERSATION = [
    {"from": "human", "value": "<image>\nWhat is it?"},
    {"from": "gpt", "value": "A cup."},
    {"from": "human", "value": "Whose, game maker?"},
    {"from": "gpt", "value": "Mine."},
]


def test_llava_instruct(tmp_path: Path):
    picture(tmp_path / "coco" / "1.jpg")
    rows = [
        {"id": "1", "image": "coco/1.jpg", "conversations": CONVERSATION},
        {"id": "2", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"id": "3", "image": "coco/1.jpg", "conversations": [{"from": "alien", "value": "?"}]},
        {"id": "4", "image": "coco/2.jpg", "conversations": CONVERSATION},
        {"id": "5", "conversations": CONVERSATION[:1]},
    ]
    path = document(tmp_path / "llava_instruct_150k.json", rows)
    found = load_records(f"llava-instruct:{path},{tmp_path}")
    assert [(r.key, r.prompt, r.answer) for r in found] == [
        ("0-1-1", "What is it?", "A cup."),
        ("0-1-2", "Whose, game maker?", "Mine."),  # no letter of the mark is stripped off a text
        ("1-2-1", "Hi", "Ho"),
    ]
    assert found[1].history == (("user", "What is it?"), ("assistant", "A cup."))
    assert found[0].history == () and found[2].image is None
    assert places(found, path) == ["[2]", "[3]", "[4]"]
    assert [r.key for r in load_records(f"llava-instruct:{path},{tmp_path},turns=first")] == [
        "0-1-1",
        "1-2-1",
    ]


def test_sharegpt(tmp_path: Path):
    cut = [{"from": "gpt", "value": "the end of something"}, *CONVERSATION[2:]]
    system = [{"from": "system", "value": "Be brief."}, *CONVERSATION[2:]]
    rows = [{"id": "a", "conversations": cut}, {"id": "b", "conversations": system}, {"id": "c"}, 3]
    path = document(tmp_path / "sharegpt.json", rows)
    found = load_records(f"sharegpt:{path}")
    assert [(r.key, r.prompt, r.history) for r in found] == [
        ("0-a-1", "Whose, game maker?", ()),
        ("1-b-1", "Whose, game maker?", (("system", "Be brief."),)),
    ]
    assert places(found, path) == ["[2]", "[3]"]
    with pytest.raises(OptionError, match="turns='some'"):
        load_records(f"sharegpt:{path},turns=some")


def test_a_conversation_is_asked_as_the_model_reads_one():
    image = Image.new("RGB", (8, 6))
    record = Record(
        "k", "how many?", history=(("system", "Be brief."), ("user", "is it red?"), ("assistant", "no"))
    )
    text = prompt_of(record, None, template=False, vision=True)
    assert text == "Be brief. Question: is it red? Answer: no Question: how many? Answer:"
    plain: Any = prompt_of(record, None, template=True, vision=False)
    assert [m["content"] for m in plain] == ["Be brief.", "is it red?", "no", "how many?"]
    seen: Any = prompt_of(record, [image, Video("x.mp4")], template=True, vision=True)
    assert [m["role"] for m in seen] == ["system", "user", "assistant", "user"]
    assert [[part["type"] for part in m["content"]] for m in seen] == [
        ["text"],
        ["image", "video", "text"],
        ["text"],
        ["text"],
    ]
    assert prompt_of(Record("k", "how many?"), image, template=True, vision=True) == "how many?"


@pytest.mark.parametrize("kind", ["llava", "qwen2.5-vl", "blip2-t5"])
def test_targets_read_conversations_and_frames(kind: str, tmp_path: Path):
    """Earlier turns change what a target is asked; it names a video that it cannot read."""
    target = make_target(kind, tmp_path / "model")
    history = (("user", "a red cup"), ("assistant", "a cup is on the table"))
    image = ImageRef(file=str(picture(tmp_path / "a.png")))
    alone, behind = Record("k", "the cup", image), Record("k", "the cup", image, history=history)
    first, second = target.prompt(alone), target.prompt(behind)
    assert len(second.input_ids) > len(first.input_ids)
    answers = target.generate([alone, behind], 4)
    assert [target.generate([record], 4)[0] for record in (alone, behind)] == answers
    frames(tmp_path / "film")
    if kind != "qwen2.5-vl":
        with pytest.raises(InputError, match=r"record k is a video.*does not read.*frames=N"):
            target.prompt(Record("k", "x", ImageRef(video=str(tmp_path / "film"))))
    if kind != "blip2-t5":
        several = Record("k", "the cup", ImageRef(video=str(tmp_path / "film"), frames=3))
        assert len(target.prompt(several).input_ids) > len(first.input_ids)
    with pytest.raises(InputError, match="stands for an image row"):
        mark = target.tokenizer.convert_ids_to_tokens(target.family.image_token_id)
        target.prompt(Record("k", "x", image, history=(("user", mark), ("assistant", "x"))))


# --- any table ---


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "tsv"])
def test_fields_of_any_table(ending: str, tmp_path: Path):
    picture(tmp_path / "p" / "7.png")
    rows = [
        {"q": "Which, then?", "id": "7", "a": "red", "n": "x"},
        {"q": "Gone?", "id": "8", "a": "blue", "n": ""},
    ]
    path = tmp_path / f"rows.{ending}"
    mark = {"csv": ",", "tsv": "\t"}.get(ending)
    if ending == "json":
        document(path, {"data": {"rows": rows}})
    elif mark is None:
        document(path, "\n".join(map(json.dumps, rows)))
    else:
        lines = [mark.join(rows[0]), *(mark.join(f'"{v}"' for v in row.values()) for row in rows)]
        document(path, "\n".join(lines))
    where = ",rows=data.rows" if ending == "json" else ""
    found = load_records(
        f"fields:{path},{tmp_path / 'p'},prompt=Say: {{q}},image={{id}}.png,answer=a,key=id{where}"
    )
    assert [(r.key, r.prompt, r.answer, r.references) for r in found] == [
        ("7", "Say: Which, then?", "red", ("red",))
    ]
    second = {"json": ": data.rows[1]", "jsonl": ":2", "csv": ":3", "tsv": ":3"}[ending]
    assert found.problems == [f"{path}{second}: image {str(tmp_path / 'p' / '8.png')!r} does not exist"]


ROW = {"question": "what?", "answer": "this"}


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "txt"])
def test_a_byte_order_mark_is_no_part_of_the_data(ending: str, tmp_path: Path):
    """Excel writes one before every table."""
    path = tmp_path / f"rows.{ending}"
    text = {"csv": "question,answer\nwhat?,this\n", "txt": "1.jpg#0\tthis\n"}.get(ending)
    path.write_text(text or json.dumps([ROW] if ending == "json" else ROW), "utf-8-sig")
    if ending == "txt":
        picture(tmp_path / "1.jpg")
        found = load_records(f"flickr8k:{path},{tmp_path}", prompt="what?")
    else:
        found = load_records(f"fields:{path},prompt=question,answer=answer")
    assert [(r.prompt, r.answer) for r in found] == [("what?", "this")] and not found.problems


def test_fields_that_are_not_there_are_named(tmp_path: Path):
    path = document(tmp_path / "rows.json", [{"q": "a"}, {"q": ["a"]}, {"p": "a"}])
    found = load_records(f"fields:{path},prompt=q")
    assert [r.key for r in found] == ["0"]
    assert (
        "field 'q' is ['a'], not a text" in found.problems[0]
        and "no field 'q'; it has p" in found.problems[1]
    )
    for words, reason in (
        ("", "names no request"),
        (",prompt=q,prompt=p", "given twice"),
        (",x,y,prompt=q", "give fields:"),
    ):
        with pytest.raises(OptionError, match=reason):
            load_records(f"fields:{path}{words}")


# --- datasets ---


def test_sets_of_hugging_face(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    files = [str(picture(tmp_path / f"{n}.png")) for n in range(2)]
    rows = {
        "image": [*files, None],
        "question": ["what?", "where?", "who?"],
        "answers": [["a", "b"], [], ["c", "d"]],
        "talk": [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]] * 3,
    }
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "saved"))
    form = f"hf:{tmp_path / 'saved'},split=test"
    found = load_records(f"{form},prompt=question,image=image,answers=answers")
    assert [(r.key, r.prompt, r.references) for r in found] == [
        ("0", "what?", ("a", "b")),
        ("2", "who?", ("c", "d")),
    ]
    assert found.problems[0].startswith(f"hf:{tmp_path / 'saved'}[test]: row 1: field 'answers' is []")
    assert found[0].image.load().getpixel((0, 0)) == (10, 200, 30) and found[1].image is None
    assert type(found[0].image).from_json(found[0].image.to_json()) == found[0].image
    assert [r.answer for r in load_records(f"{form},conversations=talk")] == ["ho"] * 3
    for words, reason in (
        (",prompt=question,image=question", "holds no pictures"),
        (",conversations=image", "no usable record"),
        (",prompt=question,image=photo", "no column 'photo'; it has image, question"),
        ("", "nothing says what is asked"),
    ):
        with pytest.raises(OptionError, match=reason):
            load_records(form + words)
    with pytest.raises(OptionError, match=r"no split 'train'.*test"):
        load_records(f"hf:{tmp_path / 'saved'},prompt=question")


def test_a_folder_that_datasets_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    document(tmp_path / "train.jsonl", '{"question": "what?", "answer": "this"}\n')
    found = load_records(f"hf:{tmp_path},prompt=question,answer=answer")
    assert [(r.prompt, r.answer) for r in found] == [("what?", "this")]


def test_a_split_is_prepared_alone_and_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`load_dataset` would read all of them: gigabytes of others, or a damaged one, as here."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    document(folder / "data" / "train.jsonl", "{damaged")
    for name in ("validation", "test"):
        lines = [json.dumps({"question": f"{name} {n}?", "answer": "x"}) for n in range(4)]
        document(folder / "data" / f"{name}.jsonl", "\n".join(lines))
    files = [{"split": name, "path": f"data/{name}.jsonl"} for name in ("train", "validation", "test")]
    card = {"configs": [{"config_name": "lite", "data_files": files}]}
    document(folder / "README.md", f"---\n{json.dumps(card)}\n---\n")

    def asked_of(split: str) -> list[str]:
        form = f"hf:{folder},config=lite,split={split},prompt=question"
        return [r.prompt for r in load_records(form)]

    assert asked_of("validation") == [f"validation {n}?" for n in range(4)]
    assert asked_of("validation[1:3]+test[:25%]") == ["validation 1?", "validation 2?", "test 0?"]
    with pytest.raises(OptionError, match=r"set has no split 'val'; it has train, validation, test$"):
        asked_of("val[:2]")
    with pytest.raises(OptionError, match="cannot be opened"):
        asked_of("validation[a:b]")
    with pytest.raises(OptionError, match="cannot be opened"):
        asked_of("train")


def test_slices_of_a_saved_set(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"question": [f"{n}?" for n in range(4)]})
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": one, "val": one}).save_to_disk(str(tmp_path / "two"))
    for form, asked_for in (
        ("one", ["0?", "1?", "2?", "3?"]),
        ("one,split=train[1:3]", ["1?", "2?"]),
        ("two,split=val[-1:]+test[:1]", ["3?", "0?"]),
    ):
        found = load_records(f"hf:{tmp_path}/{form},prompt=question")
        assert [r.prompt for r in found] == asked_for
    with pytest.raises(OptionError, match="no split 'train'; it has test, val"):
        load_records(f"hf:{tmp_path}/two,split=val+train,prompt=question")


def test_a_list_of_one_picture_is_that_picture(tmp_path: Path):
    """As the columns `images` of sets on the hub are: lists, mostly of one."""
    datasets = pytest.importorskip("datasets")
    file = str(picture(tmp_path / "a.png"))
    rows = {"images": [[file], [file, file], []], "question": ["what?", "which?", "who?"]}
    made = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    made.save_to_disk(str(tmp_path / "saved"))
    found = load_records(f"hf:{tmp_path / 'saved'},prompt=question,image=images")
    assert [(r.prompt, r.image is None) for r in found] == [("what?", False), ("who?", True)]
    assert found[0].image.load().getpixel((0, 0)) == (10, 200, 30)
    assert found.problems == [
        f"hf:{tmp_path / 'saved'}[train]: row 1: column 'images' holds 2 pictures, and a record has one"
    ]
    made.select_columns(["images"]).save_to_disk(str(tmp_path / "bare"))
    bare = load_records(f"hf:{tmp_path / 'bare'},image=images", prompt="describe")
    assert [(r.key, r.prompt) for r in bare] == [("0", "describe"), ("2", "describe")]


# --- all of them ---

DAMAGED = ("[" * 100_000, "3", "[3]", '{"questions": 3}', '{"images": 3}', "\0")


@pytest.mark.parametrize("name", [name for name in names() if name not in ("images", "mme", "hf")])
def test_documents_of_another_layout_cost_one_line(name: str, tmp_path: Path):
    """Whatever they hold: an OptionError of one line, which names the file, and no other error."""
    needed = open_format(name).USAGE.partition("[")[0].count(",")
    path = tmp_path / "document.json"
    extra = ",prompt=q" if name == "fields" else ""
    for text in DAMAGED:
        document(path, text)
        with pytest.raises(OptionError) as caught:
            load_records(f"{name}:{path}{f',{tmp_path}' * needed}{extra}")
        assert "\n" not in str(caught.value) and "document.json" in str(caught.value)


@pytest.mark.parametrize("name", ["fields", "mm-vet", "textvqa", "coco", "FILE.jsonl"])
def test_nothing_behind_the_limit_is_opened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file may have 200,000 questions; every picture's header was opened before the first few were kept."""
    opened: list[str] = []
    problem = data_places.image_problem
    monkeypatch.setattr(data_places, "image_problem", lambda path: opened.append(path.name) or problem(path))
    row = {"question": "what?", "prompt": "what?", "answer": "x", "sentences": [{"raw": "x"}]}
    rows = [{**row, "imagename": f"{n}.jpg", "image": f"{n}.jpg", "image_id": n, "question_id": n, "filename": f"{n}.jpg"}
            for n in range(4)]  # fmt: skip
    for n in (0, 2, 3):
        picture(tmp_path / f"{n}.jpg")
    form, value, options = {
        "fields": ("fields", rows, ",prompt=question,image=image"),
        "mm-vet": ("mm-vet", {str(n): one for n, one in enumerate(rows)}, ""),
        "textvqa": ("textvqa", {"data": rows}, ""),
        "coco": ("coco", {"images": rows}, ""),
        "FILE.jsonl": ("", "\n".join(map(json.dumps, rows)), ""),
    }[name]
    path = document(tmp_path / ("rows.json" if form else "rows.jsonl"), value)
    data = f"{form}:{path},{tmp_path}{options}" if form else str(path)
    found = load_records(data, limit=2)
    assert len(found) == 2 and len(found.problems) == 1
    assert opened == ["0.jpg", "1.jpg", "2.jpg"]


@pytest.mark.parametrize("name", names())
def test_every_form_has_a_usage_and_a_line_in_the_docs(name: str):
    form = open_format(name)
    with pytest.raises(OptionError, match=re.escape(f"give {name}:{form.USAGE}")):
        load_records(f"{name}:")
    assert f"`{name}:" in (ROOT / "docs" / "how-to" / "data.md").read_text("utf-8")


def test_a_form_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from vlmexport.calibration.data import formats

    source = "from ..records import Record\nUSAGE, TASK = 'WORDS', 'captions'\n"
    source += (
        "def load(arguments, prompt, problems):\n    return [Record('k', w) for w in arguments.places]\n"
    )
    document(
        tmp_path / "my_form.py", source.replace("..records", "vlmexport.calibration.data.reading.records")
    )
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    assert "my-form" in names()
    assert load_records("my-form:hello").records == [Record("k", "hello")]


def test_an_unknown_form_is_told_all_names():
    with pytest.raises(OptionError, match=r"visdail:a.*visdial.*vqav2"):
        load_records("visdail:a")
