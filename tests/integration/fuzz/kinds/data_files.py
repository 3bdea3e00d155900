"""Files of data in every form that reads files: structured mutants, names of any kind, other encodings, and what is no file.
What is served has pictures that can be read, inside of the folder where one is named."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import json_text, linked_copy, mutate_bytes, mutate_json

from .base import call, picture

PICTURE = "a.png"
TURNS = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cup"}]
ROW = {"question": "what?", "answer": "a cup", "question_id": 7}
DOCUMENTS: dict[str, tuple[str, Any]] = {
    "coco:{0},{f}": ("d.json", {
        "images": [{"id": 1, "file_name": PICTURE}, {"id": 2, "file_name": "b.png"}],
        "annotations": [{"image_id": 1, "caption": "a cup"}, {"image_id": 2, "caption": "a box"}],
    }),
    "coco:{0},{f},test": ("d.json", {
        "images": [{"filename": PICTURE, "filepath": "", "split": "test", "sentences": [{"raw": "a cup"}]}]
    }),
    "nocaps:{0},{f}": ("d.json", {
        "images": [{"id": 1, "file_name": PICTURE, "domain": "in-domain"}], "annotations": [{"image_id": 1, "caption": "a cup"}],
    }),
    "vqav2:{0},{f}": ("d.json", {"data_subtype": "val2014", "questions": [{**ROW, "image_id": 42}, {**ROW, "image_id": PICTURE}]}),
    "vqav2:q.json,{f},{0}": ("d.json", {
        "annotations": [{"question_id": 7, "multiple_choice_answer": "a cup", "answers": [{"answer": "a cup"}, {"answer": ""}]}]
    }),
    "visdial:{0},{f}": ("d.json", {"split": "val2018", "data": {
        "questions": ["what?", "where?"], "answers": ["a cup", "here"],
        "dialogs": [{"image_id": 42, "caption": "a cup", "dialog": [
            {"question": 0, "answer": 0, "answer_options": [0, 1], "gt_index": 0}, {"question": 1, "answer": 1}]}],
    }}),
    "textvqa:{0},{f}": ("d.json", {"data": [{**ROW, "image_id": "c", "answers": ["a cup", "cup"]}]}),
    "vizwiz:{0},{f}": ("d.json", [{"image": PICTURE, "question": "what?", "answers": [{"answer": "a cup"}]}]),
    "gqa:{0},{f}": ("d.json", {"07": {"imageId": "c", "question": "what?", "answer": "a cup"}}),
    "scienceqa:{0},{f},val": ("d.json", {
        "3": {"hint": "", "question": "what?", "image": PICTURE, "choices": ["a", "b"], "answer": 1, "split": "val"}
    }),
    "scienceqa:{0},{f},mini": ("d.json", {
        "3": {"hint": "", "question": "what?", "image": None, "choices": ["a", "b"], "answer": 1, "split": "val"}
    }),
    "seed:{0},{f},frames=2": ("d.json", {"questions": [
        {**ROW, "data_type": "image", "data_id": PICTURE, "choice_a": "x", "choice_b": "y", "choice_c": "z", "choice_d": "w", "answer": "A"},
        {**ROW, "data_type": "video", "data_id": "film", "choice_a": "x", "choice_b": "y", "choice_c": "z", "choice_d": "w", "answer": "B",
         "segment": [0, 2]}]}),
    "mm-vet:{0},{f}": ("d.json", {"v1": {"imagename": PICTURE, "question": "what?", "answer": "1<AND>2<OR>12"}}),
    "msvd-qa:{0},{f}/films,frames=2": ("d.json", [{"id": 0, "video_id": 1, "question": "what?", "answer": "a cup"}]),
    "msvd-qa:m.json,{f}/films,{0},frames=1": ("d.txt", "some_film vid1\nother vid2\n"),
    "llava-instruct:{0},{f}": ("d.json", [{"id": "1", "image": PICTURE, "conversations": TURNS}, {"id": "2", "conversations": TURNS}]),
    "sharegpt:{0}": ("d.json", [{"id": "1", "conversations": TURNS * 2}]),
    "fields:{0},{f},rows=rows,prompt=question,image=image,answers=answers[].answer": ("d.json", {
        "rows": [{"question": "what?", "image": PICTURE, "answers": [{"answer": "a cup"}]}]
    }),
    "fields:{0},{f},prompt=q,video=v,frames=2": ("d.json", [{"q": "what?", "v": "film"}]),
    "fields:{0},{f},prompt=q,image=i ": ("d.csv", f'q,i\n"what, then?",{PICTURE}\nwhere?,b.png\n'),
    "fields:{0},{f},prompt=q,image=i": ("d.tsv", f"q\ti\nwhat?\t{PICTURE}\nwhere?\tb.png\n"),
    "fields:{0},{f},prompt=question,image=image": ("d.jsonl", [{"question": "what?", "image": PICTURE}] * 2),
    "{0}": ("d.jsonl", [
        {"image": PICTURE, "prompt": "what?", "answer": "a cup"}, {"question": "what?", "images": [PICTURE], "answers": ["a", "b"]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": "what?"}]},
                      {"role": "assistant", "content": "a cup"}]},
    ]),
    "flickr8k:{0},{f}": ("d.txt", f"{PICTURE}#0\ta cup\n{PICTURE}#1\ta box\nb.png#0\ta table\n"),
    "flickr8k:{0},{f} ": ("d.txt", f'image,caption\n{PICTURE},a cup\n{PICTURE},"a box, too"\n'),
    "mme:{f}/mme": ("mme/colour/a.txt", "Is it red?\tYes\nIs it blue?\tNo\n"),
    "{f}/answers": ("answers/shard-00000.jsonl", [
        {"key": "1", "prompt": "what?", "image": {"file": "@/a.png"}, "tokens": [1, 2], "text": "x"},
        {"key": "2", "prompt": "what?", "image": {"video": "@/film", "frames": 2, "segment": [0, 2]}, "tokens": [1], "text": "x",
         "history": [["user", "a"], ["assistant", "b"]]},
    ]),
    "{f}/answers ": ("answers/generated.json", {"target": {"name": "t", "fingerprint": "f"}, "shards": 1}),
    "images:{f}": ("a.png", None),
}  # fmt: skip
"""What `--data` is → the file that is changed and what it holds. {0} is that file, {f} the folder."""
FIXED: dict[str, Any] = {
    "q.json": {"data_subtype": "val2014", "questions": [{**ROW, "image_id": PICTURE}]},
    "m.json": [{"id": 0, "video_id": 1, "question": "what?", "answer": "a cup"}],
    "pid_splits.json": {"mini": ["3"], "val": ["3"]},
}
NAMES = (
    "x" * 255, "x" * 256, "x" * 5000, "a/" * 3000, "a\x00.png", "\ud800.png", "\udcff.png", "\n.png", "\x1b[31m.png", "‮.png", "",
    " ", ".", "..", "/", "~", "../a.png", "/etc/passwd", "/dev/zero", "/dev/stdin", "/dev/fd/0", "/proc/self/environ", "out.png",
    "gone.png", "loop.png", "pipe.png", "dir.png", "bad.png", "film", "film/../a.png", "http://127.0.0.1/a.png", "file:///etc/passwd",
    "data:image/png;base64,AAAA", "rtsp://127.0.0.1/a", "0", 7, -1, 10**30, 1.5, None, True, ["a.png"], {"path": "a.png"},
)  # fmt: skip


class Seeds:
    """A folder with whole data of every form."""

    def __init__(self, folder: Path):
        from vlmexport.calibration.data import load_records

        self._whole = folder / "whole"
        if not self._whole.is_dir():
            _write(self._whole)
        for number, (form, (name, _)) in enumerate(DOCUMENTS.items()):
            place = linked_copy(self._whole, folder / f"try-{number}")
            _put(place, name, _text(form, place))
            with contextlib.redirect_stderr(io.StringIO()):
                load_records(_named(form, place))  # each form is whole

    def make(self, rng: random.Random, folder: Path) -> Case:
        place = linked_copy(self._whole, folder / "data")
        _odd_files(place)
        form = rng.choice(list(DOCUMENTS))
        name, document = DOCUMENTS[form]
        _put(place, name, _changed(document, place, rng) if document is not None else None)
        if rng.random() < 0.12:
            _no_file(place / name, rng)
        inside = place if rng.random() < 0.4 else None
        strict, limit = rng.random() < 0.2, rng.choice((None, None, None, 1))
        data = _named(form, place)
        if rng.random() < 0.03:
            data = data.replace(
                str(place), rng.choice(("x" * 5000, "/dev/null", "", "a\x00b", str(place / PICTURE))), 1
            )
        return Case(
            call(lambda: _read(data, inside, strict, limit)), one_line=False
        )  # bad records are listed


def _read(data: str, inside: Path | None, strict: bool, limit: int | None) -> None:
    """Reads the records and their pictures; what is said is in whole lines."""
    from vlmexport.calibration.data import load_records
    from vlmexport.runtime.common import bounded_files

    bounded_files.PIPE_WAIT = 0.02
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = load_records(data, strict=strict, limit=limit, inside=inside)
    finally:
        lines = said.getvalue().splitlines()
        assert all(line.isprintable() and len(line) < 2500 for line in lines), lines
        sys.stderr.write(said.getvalue()[:2000])
    for record in found.records[:4]:
        image = record.image
        if image is None:
            continue
        named = image.file or image.video
        assert inside is None or Path(os.path.realpath(named)).is_relative_to(os.path.realpath(inside)), named
        if image.file is None or "answers" not in data:  # those of shards are looked at when they are needed
            image.load() if image.frames is None or "answers" not in data else None


def _named(form: str, place: Path) -> str:
    named = form.strip().replace("{0}", str(place / DOCUMENTS[form][0])).replace("{f}", str(place))
    return named.replace(":q.json", f":{place / 'q.json'}").replace(":m.json", f":{place / 'm.json'}")


def _text(form: str, place: Path) -> bytes | None:
    """The whole document of a form."""
    name, document = DOCUMENTS[form]
    if document is None or isinstance(document, str):
        return None if document is None else document.encode()
    lines = [json.dumps(_placed(one, place)) for one in (document if name.endswith("l") else [document])]
    return "\n".join(lines).encode()


def _placed(document: Any, place: Path) -> Any:
    return json.loads(json.dumps(document).replace("@/", f"{place}/"))


def _changed(document: Any, place: Path, rng: random.Random) -> bytes:
    """A document as a file, changed in one way or two."""
    if isinstance(document, str):
        text = document
        if rng.random() < 0.4:
            text = text.replace(PICTURE.partition(".")[0], str(rng.choice(NAMES)), 1)
        data = text.encode("utf-8", "surrogatepass")
    else:
        lines = document if isinstance(document, list) and rng.random() < 0.5 else None
        changed = (
            _odd_names(_placed(document, place), rng)
            if rng.random() < 0.5
            else mutate_json(_placed(document, place), rng)
        )
        if isinstance(document, list) and lines is not None and isinstance(changed, list):
            data = b"\n".join(
                json_text(one, rng) for one in changed
            )  # as JSONL; for a JSON form a mutant as well
        else:
            data = json_text(changed, rng)
        data = _odd_json(data, rng)
    return _odd_bytes(data, rng)


def _odd_names(document: Any, rng: random.Random) -> Any:
    """The name of a picture or a film by another."""
    if isinstance(document, dict):
        named = [key for key, value in document.items() if _names_a_file(key, value)]
        if named and rng.random() < 0.8:
            return {**document, rng.choice(named): rng.choice(NAMES)}
        return {key: _odd_names(value, rng) for key, value in document.items()}
    return [_odd_names(one, rng) for one in document] if isinstance(document, list) else document


def _names_a_file(key: str, value: Any) -> bool:
    words = ("image", "file", "video", "data_id", "v", "path", "name", "images")
    return any(key.endswith(word) or key.startswith(word) for word in words) and not isinstance(value, dict)


def _odd_json(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(20)
    if kind == 0:
        return data.replace(b"1", b"1" * 10**6, 1)
    if kind == 1:
        return data.replace(b'"', b'"image": 3, "', 1)
    if kind == 2:
        return data.replace(b"a cup", b"cup " * 10**6, 1)
    if kind == 3:
        return data.replace(b"a cup", b"\\ud800", 1)
    if kind == 4:
        return data.replace(b"1", b"1e999", 1)
    return data


def _odd_bytes(data: bytes, rng: random.Random) -> bytes:
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: b"\xef\xbb\xbf" + data, lambda: data.decode("utf-8", "replace").encode("utf-16"), lambda: gzip.compress(data),
        lambda: data.decode("utf-8", "replace").encode("utf-32"), lambda: data.decode("utf-8", "replace").encode("latin-1", "replace"),
        lambda: b"", lambda: b"\x00" * 100_000, lambda: data.replace(b"\n", b"\r"), lambda: data.replace(b"\n", b"\r\n"),
        lambda: mutate_bytes(data, rng), lambda: mutate_bytes(data, rng), lambda: mutate_bytes(data, rng), lambda: data + b"," * 10**6,
        lambda: b'"' + data, lambda: data * 2,
    )  # fmt: skip
    return rng.choice(changes)() if rng.random() < 0.3 else data


def _no_file(path: Path, rng: random.Random) -> None:
    """Something that is no file, or one that is too long, in place of a file."""
    path.unlink(missing_ok=True)
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(
            rng.choice(("/dev/zero", "/dev/urandom", "/dev/null", "/nowhere", str(path), "/proc/self/mem"))
        )
    elif kind == 3:
        with path.open("wb") as file:
            file.truncate(1 << 33 if path.suffix == ".json" else 80 << 20)
    elif kind == 4:
        return
    else:
        path.write_bytes(b'{"' + b"x" * (9 << 20))


def _odd_files(place: Path) -> None:
    """What names of pictures may lead to, in the folder."""
    (place / "out.png").symlink_to("/etc/passwd")
    (place / "gone.png").symlink_to("/nowhere/a.png")
    (place / "loop.png").symlink_to(place / "loop.png")
    os.mkfifo(place / "pipe.png")
    (place / "dir.png").mkdir()


def _put(place: Path, name: str, data: bytes | None) -> None:
    if data is not None:
        (place / name).unlink(missing_ok=True)
        (place / name).write_bytes(data)


def _write(place: Path) -> None:
    for folder in ("", "film", "films", "films/some_film", "mme", "mme/colour", "answers", "val", "val/3"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    for name in (PICTURE, "b.png", "c.jpg", "film/0.png", "film/1.png", "films/some_film/0.png", "mme/colour/a.png",
                 "val/3/a.png", "COCO_val2014_000000000042.jpg", "VisualDialog_val2018_000000000042.jpg"):  # fmt: skip
        picture(place / name, (9, 7))
    (place / "films" / "vid1").mkdir()
    picture(place / "films" / "vid1" / "0.png", (9, 7))
    (place / "bad.png").write_bytes((place / PICTURE).read_bytes()[:20])
    for name, document in FIXED.items():
        (place / name).write_text(json.dumps(document))
    for form, (name, document) in DOCUMENTS.items():
        if "answers" in form and document is not None:
            (place / name).write_bytes(_text(form, place) or b"")


def prepare(folder: Path) -> Seeds:
    """Whole data of every form."""
    return Seeds(folder)
