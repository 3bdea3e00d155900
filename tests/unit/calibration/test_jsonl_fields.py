"""JSONL as people have it: the words that the field uses are read, and what is not read is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.data.reading.records import Record
from vlmexport.runtime.common.errors import InputError, OptionError

ASKED = [{"role": "user", "content": "What is it?"}]
TALK = [*ASKED, {"role": "assistant", "content": "A cup."}]
PARTS = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "A cup."}]},
]
SHARED = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cup."}]


def write(folder: Path, *entries: Any, name: str = "q.jsonl") -> Path:
    """The entries as lines, beside the pictures that they name."""
    for picture in ("a.png", "b.png"):
        Image.new("RGB", (8, 6)).save(folder / picture)
    (folder / name).write_text("\n".join(map(json.dumps, entries)))
    return folder / name


def read(folder: Path, *entries: Any, **given: Any) -> RecordSet:
    return load_records(str(write(folder, *entries)), **given)


def shown(record: Record) -> str | None:
    return None if record.image is None else Path(str(record.image.file)).name


@pytest.mark.parametrize(
    ("entry", "prompt", "image", "answer", "references"),
    [
        ({"prompt": "Is it red?", "image": "a.png", "answer": "no"}, "Is it red?", "a.png", "no", ("no",)),
        ({"question": "Is it red?", "image": "a.png", "answer": "no"}, "Is it red?", "a.png", "no", ("no",)),
        ({"question": "Is it red?", "prompt": None}, "Is it red?", None, None, ()),
        ({"question": "Is it red?", "prompt": ""}, "Is it red?", None, None, ()),
        ({"question": "Why?", "answers": ["a", "b"]}, "Why?", None, "a", ("a", "b")),
        ({"question": "Why?", "answers": [{"answer": "a", "answer_id": 1}]}, "Why?", None, "a", ("a",)),
        ({"question": "Why?", "answer": "c", "answers": ["a", "b"]}, "Why?", None, "c", ("a", "b")),
        ({"prompt": "Why?", "answer": ""}, "Why?", None, "", ()),
        ({"image": "a.png", "answer": "a cup"}, "describe", "a.png", "a cup", ("a cup",)),
        ({"images": ["b.png"], "question": "Why?"}, "Why?", "b.png", None, ()),
        ({"images": [], "question": "Why?"}, "Why?", None, None, ()),
        ({"messages": TALK, "image": "a.png"}, "What is it?", "a.png", "A cup.", ("A cup.",)),
        ({"messages": PARTS}, "What is it?", "a.png", "A cup.", ("A cup.",)),
        ({"messages": PARTS, "image": "a.png"}, "What is it?", "a.png", "A cup.", ("A cup.",)),
        ({"messages": ASKED}, "What is it?", None, None, ()),
        ({"question": "What is it?", "answers": []}, "What is it?", None, None, ()),
        ({"messages": ASKED, "answer": "A cup."}, "What is it?", None, "A cup.", ("A cup.",)),
        ({"conversations": SHARED, "images": ["a.png"]}, "What is it?", "a.png", "A cup.", ("A cup.",)),
    ],
)
def test_common_field_names_are_read(
    entry: dict, prompt: str, image: str | None, answer: str | None, references: tuple, tmp_path: Path, capsys
):
    (one,) = read(tmp_path, entry, prompt="describe", strict=True)
    assert (one.prompt, shown(one), one.answer, one.references) == (prompt, image, answer, references)
    assert capsys.readouterr().err == ""


def test_a_record_per_answer_of_a_conversation(tmp_path: Path):
    talk = [*TALK, {"role": "user", "content": "Whose?"}, {"role": "assistant", "content": "Mine."}, *ASKED]
    first, second, last = read(tmp_path, {"messages": talk, "image": "a.png", "answer": "A bowl."})
    assert (last.key, last.answer, last.references, len(last.history)) == (
        "line-1-3",
        "A bowl.",
        ("A bowl.",),
        4,
    )
    assert (first.key, second.key, second.prompt, second.answer) == (
        "line-1-1",
        "line-1-2",
        "Whose?",
        "Mine.",
    )
    assert second.history == (("user", "What is it?"), ("assistant", "A cup.")) and shown(second) == "a.png"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"query": "?"}, "neither 'prompt' nor 'image'"),
        ({"prompt": ""}, "neither 'prompt' nor 'image'"),
        ({"question": 3}, "field 'question' is 3, not a string"),
        ({"question": "?", "answer": ["a"]}, r"field 'answer' is \['a'\], not a string"),
        ({"question": "?", "answers": "a"}, "field 'answers' is 'a', not a list"),
        ({"question": "?", "answers": [3]}, "field 'answers' holds 3"),
        ({"question": "?", "images": "a.png"}, "field 'images' is 'a.png', not a list"),
        ({"question": "?", "images": ["a.png", "b.png"]}, "the record has 2 pictures, and one is read"),
        ({"question": "?", "images": ["c.png"]}, "does not exist"),
        ({"messages": PARTS, "image": "b.png"}, "the record has 2 pictures"),
        ({"messages": "hi"}, "field 'messages' is 'hi', not a list"),
        ({"messages": [{"role": "tool", "content": "?"}]}, r"messages\[0\]: role 'tool' is none of"),
        ({"messages": [*TALK, {"role": "tool", "content": "?"}]}, r"messages\[2\]: role 'tool' is none of"),
        ({"messages": TALK, "answer": "A bowl."}, "an answer stands beside 'messages', which end with one"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "neither a text nor a picture"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
         "does not exist"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}, "the picture is 3, not a path"),
        ({"messages": [*TALK, PARTS[1]]}, r"messages\[2\]: a picture is read in the user's first turn alone"),
        ({"messages": [PARTS[0]]}, "neither an answer nor a question"),
        ({"conversations": [3]}, "a JSON object is expected"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_bad_records_are_explained(entry: dict, problem: str, tmp_path: Path):
    found = read(tmp_path, {"prompt": "fine"}, entry)
    assert len(found) == 1 and len(found.problems) == 1 and "\n" not in found.problems[0]
    with pytest.raises(InputError, match=problem):
        read(tmp_path, {"prompt": "fine"}, entry, strict=True)


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({"query": "Is it red?", "image": "a.png", "answer": "no"},
         "field `query` is not read (60 records have no prompt); did you mean --data "
         "fields:{path},prompt=query,image=image,answer=answer?"),
        ({"Question": "Is it red?", "img_path": "a.png", "answers": ["no"], "image": "b.png"},
         "fields `Question`, `img_path` are not read"),
        ({"question": "?", "img": "a.png", "response": "no"},
         "fields `img`, `response` are not read (60 records have no image, 60 records have no answer); did you mean --data "
         "fields:{path},prompt=question,image=img,answer=response?"),
        ({"promt": "?", "image": "a.png"},
         "field `promt` is not read (60 records have no prompt); did you mean --data fields:{path},prompt=promt,image=image?"),
        ({"prompt": "Answer.", "question": "Is it red?"}, "field `question` is not read"),
        ({"messages": TALK, "prompt": "Is it red?"}, "field `prompt` is not read"),
        ({"messages": [{**turn, "weight": 0} for turn in TALK]}, "field `messages[].weight` is not read"),
        ({"question": "?", "category": "colour", "id": 7, "video": None, "tags": []}, "field `category` is not read"),
        ({"question": "?", **{f"f{i}": 1 for i in range(12)}}, "and 4 more are not read"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_unread_fields_are_reported_once(entry: dict, line: str, tmp_path: Path, capsys):
    found = read(tmp_path, *[entry] * 60)
    assert len(found) == 60 and found.problems == []
    (said,) = capsys.readouterr().err.splitlines()
    assert (
        said.startswith(f"{tmp_path / 'q.jsonl'}: field") and line.format(path=tmp_path / "q.jsonl") in said
    )
    with pytest.raises(InputError, match=r"not read.*without --strict it would be left out"):
        read(tmp_path, *[entry] * 60, strict=True)


def test_suggested_options_read_the_records(tmp_path: Path, capsys):
    path = write(tmp_path, *[{"query": "Is it red?", "image": "a.png", "answer": "no"}] * 3)
    load_records(str(path))
    suggested = capsys.readouterr().err.strip().partition("--data ")[2].removesuffix("?")
    found = load_records(suggested)
    assert [(r.prompt, shown(r), r.references) for r in found] == [("Is it red?", "a.png", ("no",))] * 3
    assert capsys.readouterr().err == ""


def test_fields_of_some_records_are_counted(tmp_path: Path, capsys):
    read(tmp_path, {"prompt": "a"}, {"prompt": "b", "source": "web"}, {"prompt": "c", "source": "web"})
    assert "field `source` (2 of 3 records) is not read" in capsys.readouterr().err
    read(tmp_path, {"prompt": "a"}, {"prompt": "b", "source": "web"}, limit=1, strict=True)


@pytest.mark.parametrize("form", ["llava-instruct", "sharegpt"])
def test_fields_of_published_layouts_are_said_too(form: str, tmp_path: Path, capsys):
    places = f"{tmp_path / 'talk.json'}" + (f",{tmp_path}" if form == "llava-instruct" else "")
    entry = {"id": "1", "model": "gpt", "conversations": SHARED}
    (tmp_path / "talk.json").write_text(json.dumps([entry, {**entry, "video": "film.mp4"}]))
    found = load_records(f"{form}:{places}")
    assert len(found) == 2
    assert "talk.json: field `video` (1 of 2 records) is not read" in capsys.readouterr().err
    with pytest.raises(InputError, match="`video`"):
        load_records(f"{form}:{places}", strict=True)


def test_a_table_has_no_more_values_than_names(tmp_path: Path):
    """A comma that is not quoted would cut the prompt."""
    path = tmp_path / "rows.csv"
    path.write_text('q,a\nIs it red,or blue?,red\n"Is it red, or blue?",red\nWhy?,so,,\n')
    found = load_records(f"fields:{path},prompt=q,answer=a")
    assert [r.prompt for r in found] == ["Is it red, or blue?", "Why?"]
    (problem,) = found.problems
    assert problem.startswith(
        f"{path}:2: 1 value(s) more than the header has names; quote texts that hold ','"
    )


def test_file_without_usable_records_is_reported(tmp_path: Path, capsys):
    with pytest.raises(OptionError, match=r"no usable record \(2 were bad\)"):
        read(tmp_path, *[{"query": "?"}] * 2)
    assert "did you mean --data fields:" in capsys.readouterr().err


def test_the_documented_lines_are_read_as_they_stand(tmp_path: Path, capsys):
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "your-own-data.md").read_text("utf-8")
    block = text.partition("```json\n")[2].partition("```")[0]
    (tmp_path / "pictures").mkdir()
    for name in ("1.png", "2.png"):
        Image.new("RGB", (8, 6)).save(tmp_path / "pictures" / name)
    (tmp_path / "own.jsonl").write_text(block)
    found = load_records(str(tmp_path / "own.jsonl"), strict=True)
    assert [(r.prompt, shown(r), r.references) for r in found] == [
        ("describe the table", "1.png", ()),
        ("how many cups are there?", "1.png", ("two",)),
        ("what colour is the box?", "2.png", ("blue", "light blue")),
        ("what is it?", "2.png", ("a box",)),
    ]
    (line,) = [one for one in text.splitlines() if one.startswith("``q.jsonl: field")]
    write(tmp_path, *[{"query": "?", "image": "a.png", "answer": "no"}] * 60)
    load_records(str(tmp_path / "q.jsonl"))
    said = capsys.readouterr().err.strip().replace(str(tmp_path / "q.jsonl"), "q.jsonl")
    assert line.startswith(f"``{said}``")
