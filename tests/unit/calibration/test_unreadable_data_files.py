"""Files of data that are no files, too long, or no text, and names of pictures that are none: one line each, in every form."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from vlmexport.calibration.data import load_records
from vlmexport.calibration.data.reading import files
from vlmexport.calibration.data.reading.field_maps import LARGEST_ROW
from vlmexport.runtime.common import bounded_files
from vlmexport.runtime.common.errors import OptionError, VlmexportError

FILES = {
    "coco:{0},{f}": "json", "vqav2:{0},{f}": "json", "visdial:{0},{f}": "json", "llava-instruct:{0},{f}": "json",
    "sharegpt:{0}": "json", "nocaps:{0},{f}": "json", "textvqa:{0},{f}": "json", "vizwiz:{0},{f}": "json", "gqa:{0},{f}": "json",
    "scienceqa:{0},{f}": "json", "seed:{0},{f}": "json", "mm-vet:{0},{f}": "json", "msvd-qa:{0},{f}": "json",
    "flickr8k:{0},{f}": "txt", "fields:{0},{f},prompt=q": "json", "fields:{0},{f},prompt=q ": "jsonl", "fields:{0},prompt=q": "csv",
    "fields:{0},prompt=q ": "tsv",
}  # fmt: skip
"""What `--data` is → the ending of its file."""
JSON = [form for form, ending in FILES.items() if ending == "json"]


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch):
    """Nothing here waits for ever."""
    monkeypatch.setattr(bounded_files, "PIPE_WAIT", 0.05)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(form: str, path: Path) -> str:
    with pytest.raises(VlmexportError) as caught:
        load_records(form.strip().replace("{0}", str(path)).replace("{f}", str(path.parent)))
    line = str(caught.value)
    assert line.isprintable() and len(line) < 1000, line
    return line


@pytest.mark.parametrize("form", FILES)
def test_non_files_are_refused(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"d.{FILES[form]}"
    for make, words in (
        (lambda: path.symlink_to("/dev/zero"), "is not a regular file"),
        (path.mkdir, "is not a regular file"),
        (lambda: os.mkfifo(path), "is a pipe that nobody writes into"),
        (lambda: path.symlink_to(path), "cannot be read: Too many levels"),
        (lambda: None, "cannot be read: No such file"),
    ):
        make()
        assert words in refused(form, path)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
    assert "File name too long" in refused(form, tmp_path / ("x" * 300 + path.suffix))
    assert "no file can have that name" in refused(form, tmp_path / f"a\0{path.suffix}")


@pytest.mark.parametrize("form", JSON)
def test_invalid_json_is_named(form: str, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    for content, words in (
        (b"[" * 100_000, "nested too deep"), (b'{"a": ' + b"1" * 10**6 + b"}", "digits"), ("[1]".encode("utf-16"), "utf-16"),
        ("[1]".encode("utf-32"), "utf-32"), (gzip.compress(b"[1]"), "compressed (gzip)"), (b'["\xff"]', "byte 2 is not UTF-8"),
        (b'{"a": 1, "a": 2}', "gives the name 'a' twice"), (b"", "Expecting value"), (b"\0" * 1000, "utf-32"),
    ):  # fmt: skip
        path.write_bytes(content)
        assert "is not JSON: " in (line := refused(form, path)) and words in line


def test_json_that_is_unusual_but_clear_is_read(tmp_path: Path) -> None:
    for text in ('{"a": 1, "a": 1}', '\ufeff{"a": 1}', ' {"a":\r\n1}'):
        assert bounded_files.parse_json(text.encode()) == {"a": 1}
    assert bounded_files.parse_json(b'"\\ud800"') == "\ud800"  # who reads a field looks at its text


def test_files_are_read_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.json"
    with path.open("wb") as file:
        file.truncate(files.LARGEST_DOCUMENT + 1)
    for form in JSON:
        assert "has more than 4 GiB" in refused(form, path)
    path = tmp_path / "d.txt"
    with path.open("wb") as file:
        file.truncate(files.LARGEST_LIST + 1)
    assert "has more than 64 MiB" in refused("flickr8k:{0},{f}", path)
    monkeypatch.setattr(files, "LARGEST_DOCUMENT", 10)  # a pipe has no size
    with _written(tmp_path / "pipe.json", b" " * 20) as pipe:
        assert "has more than 10 bytes" in refused("sharegpt:{0}", pipe)


def test_a_row_of_a_table_is_bounded_over_all_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmexport.calibration.data.reading import field_maps

    assert LARGEST_ROW == 64 << 20
    monkeypatch.setattr(field_maps, "LARGEST_ROW", 1000)
    path = tmp_path / "d.csv"
    path.write_text("q\n" + "what?\n" * 1000)
    assert len(load_records(f"fields:{path},prompt=q")) == 1000
    for row in ("x" * 1001, '"' + "x\n" * 501 + '"', '"\n",' * 400):
        path.write_text(f"q\n{row}\n")
        assert "is no table" in refused("fields:{0},prompt=q", path)


def test_what_a_document_may_take_is_compared_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SMALL", 0)
    hostile, prose = b"[" + b"[]," * 1000 + b"[]]", b'["' + b"x" * 3000 + b'"]'
    files.check_memory(Path("a.json"), prose, 10_000)
    files.check_memory(Path("a.json"), hostile, None)
    with pytest.raises(
        OptionError, match=r"a\.json may take 0\.0 GB of memory when it is read, and 0\.0 GB are free"
    ):
        files.check_memory(Path("a.json"), hostile, 10_000)


class _written:
    """A pipe that somebody else writes."""

    def __init__(self, path: Path, content: bytes) -> None:
        os.mkfifo(path)
        self._path = path
        self._thread = threading.Thread(target=lambda: self._write(content), daemon=True)

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(BrokenPipeError), self._path.open("wb", buffering=0) as pipe:
            pipe.write(content[:5])
            time.sleep(0.1)  # a reader that does not wait finds nothing
            pipe.write(content[5:])

    def __enter__(self) -> Path:
        self._thread.start()
        return self._path

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)


def test_a_pipe_that_somebody_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_files, "PIPE_WAIT", 10.0)
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "x" * 300_000}]
    for name, form, content in (
        ("a.json", "sharegpt:{0}", json.dumps([{"conversations": turns}] * 3)),
        ("b.csv", "fields:{0},prompt=q", "q\n" + "what?\n" * 3),
        ("c.jsonl", "fields:{0},prompt=q", '{"q": "what?"}\n' * 3),
        ("d.json", "fields:{0},prompt=q", '[{"q": "a"}, {"q": "b"}, {"q": "c"}]'),
    ):
        with _written(tmp_path / name, content.encode()) as pipe:
            assert len(load_records(form.replace("{0}", str(pipe)))) == 3


NAMES = ["x" * 256, "x" * 5000, "a/" * 3000, "a\0.png", "\ud800.png", "\udcff.png", "\n\x1b[31m.png", ".", "..", "/", "/dev/zero",
         "pipe.png", "loop.png", "http://127.0.0.1/a.png", "data:image/png;base64,AAAA", "note.txt", "empty.png"]  # fmt: skip


SAID = {
    "x" * 256: "File name too long", "a\0.png": "no file can have that name", "pipe.png": "is not a regular file",
    ".": "is not a regular file", "note.txt": "not an image of a known format", "empty.png": "is empty",
    "http://127.0.0.1/a.png": "does not exist",
}  # fmt: skip


def _documents(name: str) -> dict[str, tuple[str, object]]:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a cup"}]
    notes = [{"image_id": key, "caption": "a cup"} for key in (1, 2)]
    return {
        "coco:{0},{f}": ("d.json", {
            "images": [{"id": 1, "file_name": name}, {"id": 2, "file_name": "a.png"}], "annotations": notes}),
        "coco:{0},{f} ": ("d.json", {"images": [
            {"filename": "x.png", "filepath": name, "sentences": [{"raw": "a"}]}, {"filename": "a.png", "sentences": [{"raw": "a"}]}]}),
        "vqav2:{0},{f}": ("d.json", {"data_subtype": "val2014", "questions": [
            {"question_id": key, "image_id": image, "question": "?"} for key, image in ((1, name), (2, "a.png"))]}),
        "vqav2:{0},{f} ": ("d.json", {"data_subtype": name, "questions": [{"question_id": 2, "image_id": "a.png", "question": "?"}]}),
        "llava-instruct:{0},{f}": ("d.json", [{"image": one, "conversations": turns} for one in (name, "a.png")]),
        "fields:{0},{f},prompt=q,image=i": ("d.json", [{"q": "?", "i": one} for one in (name, "a.png")]),
        "fields:{0},{f},prompt=q,video=i": ("d.json", [{"q": "?", "i": one} for one in (name + "/x", "film")]),
        "seed:{0},{f}": ("d.json", {"questions": [
            {"question": "?", "question_id": 1, "data_type": "image", "data_id": one, "answer": "A",
             **{f"choice_{letter}": letter for letter in "abcd"}} for one in (name, "a.png")]}),
        "{0}": ("d.jsonl", [{"prompt": "?", "image": one} for one in (name, "a.png")]),
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=[f"{name[:12]!a}-{len(name)}" for name in NAMES])
def test_bad_picture_names_cost_one_record(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "film").mkdir()
    (tmp_path / "note.txt").write_text("no picture")
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    for form, (file, document) in _documents(name).items():
        lines = document if file.endswith("l") and isinstance(document, list) else [document]
        (tmp_path / file).write_text("\n".join(map(json.dumps, lines)))
        data = form.strip().replace("{0}", str(tmp_path / file)).replace("{f}", str(tmp_path))
        capsys.readouterr()
        try:
            found = load_records(data)
        except VlmexportError as error:  # a name of the whole file
            assert str(error).isprintable() and form == "vqav2:{0},{f} ", form
            continue
        said = capsys.readouterr().err
        assert len(found) == 1 and len(found.problems) == (form != "vqav2:{0},{f} "), (form, said)
        assert len(said.splitlines()) == len(found.problems) and said.replace("\n", "").isprintable()
        assert len(said) < 1200 and (form != "{0}" or SAID.get(name, "") in said)


def test_signal_handler_exception_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.json"
    path.write_text("[]")

    def late(*_: object) -> None:
        raise TimeoutError("over")  # an OSError

    before = signal.signal(signal.SIGUSR1, late)
    whole: Callable = os.read
    monkeypatch.setattr(os, "read", lambda *given: (signal.raise_signal(signal.SIGUSR1), whole(*given))[1])
    try:
        with pytest.raises(TimeoutError):
            load_records(f"sharegpt:{path}")
    finally:
        signal.signal(signal.SIGUSR1, before)
