"""`--inside FOLDER`: which pictures and videos data may name, and that nobody learns what lies elsewhere."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from vlmexport.calibration.data import load_records
from vlmexport.calibration.data.reading.places import check_reference
from vlmexport.calibration.data.reading.records import ImageRef
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import OptionError


def _picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of data with a picture, beside one with secrets; links lead out of it and stay in it."""
    folder = tmp_path / "data"
    secret = _picture(tmp_path / "secret" / "a.png")
    _picture(folder / "a.png")
    _picture(folder / "film" / "0.png")
    (folder / "out.png").symlink_to(secret)
    (folder / "gone.png").symlink_to(tmp_path / "secret" / "none.png")
    (folder / "in.png").symlink_to(folder / "a.png")
    (folder / "outside").symlink_to(tmp_path / "secret")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "0.png").symlink_to(secret)
    (tmp_path / "door").symlink_to(folder)
    return folder


def _jsonl(folder: Path, name: str) -> str:
    (folder / "d.jsonl").write_text(json.dumps({"prompt": "what?", "image": name}))
    return str(folder / "d.jsonl")


def _messages(folder: Path, name: str) -> str:
    turns = [{"role": "user", "content": [{"type": "image", "image": name}, {"type": "text", "text": "?"}]}]
    (folder / "d.jsonl").write_text(json.dumps({"messages": turns}))
    return str(folder / "d.jsonl")


def _coco(folder: Path, name: str) -> str:
    notes = {"images": [{"id": 1, "file_name": name}], "annotations": [{"image_id": 1, "caption": "a cup"}]}
    (folder / "d.json").write_text(json.dumps(notes))
    return f"coco:{folder / 'd.json'},{folder}"


def _karpathy(folder: Path, name: str) -> str:
    head, _, tail = name.rpartition("/")
    notes = {"images": [{"filename": tail, "filepath": head and f"{head}/", "sentences": [{"raw": "a cup"}]}]}
    (folder / "d.json").write_text(json.dumps(notes))
    return f"coco:{folder / 'd.json'},{folder}"


def _vqa(folder: Path, name: str) -> str:
    asked = {"data_subtype": "val2014", "questions": [{"question_id": 1, "image_id": name, "question": "?"}]}
    (folder / "d.json").write_text(json.dumps(asked))
    return f"vqav2:{folder / 'd.json'},{folder}"


def _llava(folder: Path, name: str) -> str:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a cup"}]
    (folder / "d.json").write_text(json.dumps([{"image": name, "conversations": turns}]))
    return f"llava-instruct:{folder / 'd.json'},{folder}"


def _table(folder: Path, name: str) -> str:
    with (folder / "d.csv").open("w", newline="") as out:
        csv.writer(out).writerows([["q", "i"], ["?", name]])
    return f"fields:{folder / 'd.csv'},{folder},prompt=q,image=i"


def _flickr(folder: Path, name: str) -> str:
    (folder / "d.txt").write_text(f"{name}#0\ta cup\n")
    return f"flickr8k:{folder / 'd.txt'},{folder}"


def _generated(folder: Path, name: str) -> str:
    (folder / "generated.json").write_text(
        json.dumps({"target": {"name": "t", "fingerprint": "f"}, "shards": 1})
    )
    record = {"key": "a", "prompt": "p", "image": {"file": str(folder / name)}, "tokens": [1], "text": "x"}
    (folder / "shard-00000.jsonl").write_text(json.dumps(record))
    return str(folder)


def _textvqa(folder: Path, name: str) -> str:
    row = {"question_id": 1, "image_id": name.removesuffix(".png"), "question": "?", "image": name}
    (folder / "d.json").write_text(json.dumps({"data": [row]}))
    return f"fields:{folder / 'd.json'},{folder},rows=data,prompt=question,image=image"


FORMS = [_jsonl, _messages, _coco, _karpathy, _vqa, _llava, _table, _flickr, _generated, _textvqa]
OUT = ["../secret/a.png", "../secret/none.png", "/etc/passwd", "/etc/none", "out.png", "gone.png", "outside/a.png",
       "outside/none.png", "../secret/../data/a.png", "../none/../data/a.png"]  # fmt: skip


@pytest.mark.parametrize("write", FORMS)
def test_paths_outside_the_folder_are_refused(
    write: Callable[[Path, str], str], place: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in (
        "a.png",
        "in.png",
        "film/../a.png",
        str(place / "a.png"),
        str(place.parent / "door" / "a.png"),
    ):
        for folder in (place, place.parent / "door", place.parent):
            assert len(load_records(write(place, name), inside=folder)) == 1, name
    for name in OUT:
        capsys.readouterr()
        with pytest.raises(OptionError, match="no usable record"):
            load_records(write(place, name), inside=place)
        said = capsys.readouterr().err
        named = "d.json" in said or "d.csv" in said or "d.txt" in said or "shard" in said
        assert named and said.count("\n") == 1 and f"is not inside of {place}" in said, said
    assert len(load_records(write(place, "../secret/a.png"))) == 1  # as ever without it


def test_pictures_of_a_folder_and_frames_of_a_film(place: Path) -> None:
    names = {record.key for record in load_records(f"images:{place}", inside=place)}
    assert names == {"a.png", "in.png", "film/0.png"}
    for film, count in (("film", 1), ("mixed", 0), ("outside", 0)):
        (place / "d.json").write_text(json.dumps([{"q": "?", "v": film}, {"q": "?", "v": "film"}]))
        found = load_records(f"fields:{place / 'd.json'},{place},prompt=q,video=v", inside=place)
        assert len(found) == 1 + count


def test_generated_records_must_lie_inside(place: Path) -> None:
    for image in ({"row": ["someone/set", "", "train", 0, "image"]}, {"video": "/etc", "frames": None}):
        data = _generated(place, "a.png")
        record = {"key": "a", "prompt": "p", "image": image, "tokens": [1], "text": "x"}
        (place / "shard-00000.jsonl").write_text(json.dumps(record))
        assert len(load_records(data)) == 1
        with pytest.raises(OptionError, match="no usable record"):
            load_records(data, inside=place)


def test_hub_datasets_are_refused_with_inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for name, words in (("someone/set", "is not inside of"), (str(place / "none"), "is not inside of")):
        with pytest.raises(ValueError, match=words):
            check_reference(ImageRef(row=(name, "", "train", 0, "image")), place)


@pytest.mark.parametrize("command", ["train", "search", "generate-data", "eval"])
def test_inside_folder_is_checked_first(command: str, place: Path, capfd: pytest.CaptureFixture) -> None:
    more = {
        "train": ["-o", "o", "--draft-layer", "1"],
        "search": ["-o", "o"],
        "generate-data": ["-o", "o"],
        "eval": ["--draft", "early-exit@1"],
    }
    given = [
        command,
        "--model",
        "tiny-vit-gpt2",
        "--data",
        "scenes:train:2",
        "--inside",
        str(place / "none"),
        *more[command],
    ]
    assert main(given) == 2
    assert "none: no such folder" in capfd.readouterr().err


def test_requests_of_calibrate_stay_inside(place: Path) -> None:
    from vlmexport.calibration.calibrate import read_requests

    with pytest.raises(OptionError, match="no usable record"):
        read_requests(None, [_jsonl(place, "out.png")], 1, "", place)  # type: ignore[arg-type]
