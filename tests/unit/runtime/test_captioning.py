"""`vlmexport caption`: every picture of an index into Parquet, whatever is damaged or killed on the way."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("torch", reason="building the bundles needs [export]")
pytest.importorskip("pyarrow", reason="captions need [parquet]")

import pyarrow as pa
import vlmexport.runtime
from PIL import Image
from pyarrow import parquet
from vlmexport.runtime import Session, cli
from vlmexport.runtime.captioning.index import Index
from vlmexport.runtime.captioning.output import LOCK, Output, shard_name
from vlmexport.runtime.captioning.run import Captioned, SessionCaptioner, caption_all
from vlmexport.runtime.common.errors import ImageError, InputError, OptionError
from vlmexport.runtime.common.locks import only_one
from vlmexport.runtime.common.parts import Part

BUNDLE = "vit-gpt2"
COUNT, DAMAGED = 11, (3, 8)
SCHEMA = Path(vlmexport.runtime.__file__).parent / "schemas" / "caption-1.json"


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[[str], Any]) -> Path:
    return tiny_bundle(BUNDLE).path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """In their order: in a folder and below it, two of them damaged."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "inner").mkdir()
    (folder / ".hidden").mkdir()
    paths = [folder / ("inner" if i > 6 else "") / f"p{i}.png" for i in range(COUNT)]
    for number, path in enumerate(paths):
        picture(number).save(path)
    picture(0).save(folder / ".hidden" / "p.png")
    (folder / "notes.txt").write_text("no picture")
    for number in DAMAGED:
        paths[number].write_bytes(paths[number].read_bytes()[:40])
    return paths


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 255, (30, 40 + number, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(number: int) -> bytes:
    out = io.BytesIO()
    picture(number).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def texts(bundle: Path, pictures: list[Path]) -> list[str | None]:
    """Of each picture the text that a session gives it alone; None of damaged ones."""
    with Session.load(bundle) as session:
        found = [
            None if number in DAMAGED else session.generate(path, max_new_tokens=6).text
            for number, path in enumerate(pictures)
        ]
    assert len(set(found)) > 5, "pictures whose captions are alike would hide a wrong order"
    return found


def caption(*words: object) -> int:
    return cli.main([str(word) for word in ("caption", *words, "--max-new-tokens", 6, "--max-batch", 3)])


def rows(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist()


def test_every_picture_has_its_row(
    bundle: Path,
    pictures: list[Path],
    texts: list[str | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """In the order of the input, with the text that `Session.generate` gives; unreadable ones end nothing."""
    folder, out = pictures[0].parent, tmp_path / "captions.parquet"
    assert caption(bundle, folder, "-o", out, "--shard-size", 4, "--json") == 0
    captured = capsys.readouterr()
    made = rows(out)
    assert [row["key"] for row in made] == [str(path) for path in pictures]
    assert [row["row"] for row in made] == list(range(COUNT))
    assert [row["text"] for row in made] == texts
    for number, row in enumerate(made):
        assert (row["error"] is not None) == (number in DAMAGED) == (row["tokens"] is None)
        assert number not in DAMAGED or str(pictures[number]) in row["error"]
    assert parquet.ParquetFile(out).num_row_groups == 3 and [p.name for p in tmp_path.iterdir()] == [out.name]
    report = json.loads(captured.out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(report)
    assert (report["rows"], report["shards"], report["errors"]) == (COUNT, 3, len(DAMAGED))
    assert report["tokens"] == sum(row["tokens"] or 0 for row in made) > 0
    assert f"{COUNT} of {COUNT} pictures, " in captured.err and " pictures/s, 0 s left" in captured.err
    assert "2 of 11 pictures could not be captioned" in captured.err
    before = out.read_bytes()
    assert caption(bundle, folder, "-o", out, "--shard-size", 4) == 0, "complete: nothing is done"
    assert out.read_bytes() == before and "was complete" in capsys.readouterr().err
    for words, said in (
        ((folder, "--prompt", "a cup"), "prompt = None, not 'a cup'"),
        ((folder, "--shard-size", 5), "shard_size = 4, not 5"),
        ((folder, "--part", "0/2", "--shard-size", 4), "part = None, not '0/2'"),
        ((pictures[0], "--shard-size", 4), "pictures = '"),
    ):
        assert caption(bundle, *words, "-o", out) == 2
        assert f"{out} holds captions with {said}" in capsys.readouterr().err and out.read_bytes() == before


def test_parts_have_all_pictures_between_them(
    bundle: Path, pictures: list[Path], texts: list[str | None], tmp_path: Path
):
    """Folders of shards, of which one is read as one table."""
    found: list[dict[str, Any]] = []
    for number in range(3):
        part = Part(number, 3)
        out = tmp_path / str(number)
        assert caption(bundle, *pictures, "-o", out, "--part", part, "--shard-size", 2) == 0
        own = rows(out)
        assert [row["key"] for row in own] == [str(path) for path in pictures if part.holds(str(path))]
        assert {path.name for path in out.iterdir()} == {shard_name(n) for n in range(-(-len(own) // 2) or 1)}
        found += own
    assert [row["text"] for row in sorted(found, key=lambda row: row["row"])] == texts


def table(folder: Path, kind: str) -> Path:
    """A table of pictures in row groups of 3: paths, bytes, or structs; its fifth row has none."""
    numbers = range(COUNT)
    folder.mkdir(exist_ok=True)
    for number in numbers:
        picture(number).save(folder / f"{number}.png")
    if kind == "paths":
        images = pa.array([None if n == 4 else f"{n}.png" for n in numbers])
    elif kind == "bytes":
        images = pa.array([None if n == 4 else encoded(n) for n in numbers], pa.binary())
    else:
        either = [
            {"path": f"{n}.png", "bytes": encoded(n)} if n % 2 else {"path": f"{n}.png", "bytes": None}
            for n in numbers
        ]
        images = pa.array([None if n == 4 else either[n] for n in numbers])
    made = pa.table({"image": images, "id": pa.array([100 + n for n in numbers]), "cost": [0.5] * COUNT})
    parquet.write_table(made, folder / "index.parquet", row_group_size=3)
    return folder / "index.parquet"


@pytest.mark.parametrize("kind", ["paths", "bytes", "structs"])
def test_tables_give_their_pictures(tmp_path: Path, kind: str):
    path = table(tmp_path / "data", kind)
    index = Index([path])
    expected = (
        [f"{n}.png" for n in range(COUNT)] if kind != "bytes" else [f"{path}#{n}" for n in range(COUNT)]
    )
    expected[4] = f"{path}#4"
    assert index.keys == expected
    assert Index([path], key_column="id").keys == [str(100 + n) for n in range(COUNT)]
    for wanted in (list(range(COUNT)), [1, 7, 8]):
        found = list(index.pictures(wanted))
        assert [row for row, _ in found] == wanted
        for row, given in found:
            if row == 4:
                assert isinstance(given, ImageError) and "no picture in this row" in str(given)
            elif kind == "bytes" or (kind == "structs" and row % 2):
                assert given == encoded(row)
            else:
                assert given == path.parent / f"{row}.png"


def test_sources_follow_each_other(tmp_path: Path, pictures: list[Path]):
    path = table(tmp_path / "data", "paths")
    index = Index([pictures[9], path, pictures[1], pictures[7].parent])
    assert len(index) == 1 + COUNT + 1 + 4
    found = dict(index.pictures([0, 2, 12, 13, 16]))
    assert found == {
        0: pictures[9],
        2: path.parent / "1.png",
        12: pictures[1],
        13: pictures[7],
        16: pictures[10],
    }
    assert index.identity() != Index([path, pictures[9], pictures[1], pictures[7].parent]).identity()


def test_a_table_is_captioned(bundle: Path, tmp_path: Path):
    path, out = table(tmp_path / "data", "structs"), tmp_path / "out.parquet"
    assert caption(bundle, path, "-o", out, "--key-column", "id") == 0
    made = rows(out)
    assert [row["key"] for row in made] == [str(100 + n) for n in range(COUNT)]
    assert [row["error"] is not None for row in made] == [n == 4 for n in range(COUNT)]
    with Session.load(bundle) as session:
        assert made[6]["text"] == session.generate(picture(6), max_new_tokens=6).text


def test_inputs_that_cannot_be_read_are_refused_by_name(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = table(tmp_path / "data", "paths")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.parquet").write_bytes(path.read_bytes()[:-30])
    for words, said in (
        ((tmp_path / "nowhere",), "nowhere: no such file or folder"),
        ((tmp_path / "empty",), "neither the folder nor a folder in it has picture files"),
        ((tmp_path / "damaged.parquet",), "damaged.parquet: cannot be read as a Parquet table"),
        ((path, "--image-column", "photo"), "--image-column 'photo'"),
        ((path, "--image-column", "cost"), "holds double there; name a column of paths"),
        ((path, "--key-column", "name"), "has the columns image, id, cost; name one of them"),
    ):
        assert caption(bundle, *words, "-o", tmp_path / "out.parquet") == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()


class Killed(Exception):
    """In place of a signal."""


class Counted:
    """A captioner that refuses every picture by its row, in batches turned round; ends after `last`."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.asked: list[int] = []

    def captions(self, pictures: Iterable[tuple[int, Any]]) -> Generator[tuple[int, Any], None, None]:
        batch: list[int] = []
        for row, _ in pictures:
            if len(self.asked) == self.last:
                raise Killed
            self.asked.append(row)
            batch.append(row)
            if len(batch) == 3:
                yield from ((each, InputError(f"row {each}")) for each in batch[::-1])
                batch = []
        yield from ((each, InputError(f"row {each}")) for each in batch)


def count_all(out: Path, pictures: list[Path], last: int | None = None) -> tuple[Counted, Captioned]:
    captioner, output = Counted(last), Output(out, {"run": 1})
    with output.claimed():
        return captioner, caption_all(captioner, Index(pictures), output, 2)


@pytest.mark.parametrize("name", ["captions.parquet", "captions"])
def test_a_killed_run_is_continued(pictures: list[Path], tmp_path: Path, name: str):
    whole, _ = count_all(tmp_path / "whole" / name, pictures)
    assert whole.asked == list(range(COUNT))
    out = tmp_path / "killed" / name
    with pytest.raises(Killed):
        count_all(out, pictures, last=6)
    again, captioned = count_all(out, pictures)
    assert again.asked == list(range(6, COUNT)) or again.asked == [2, 3, *range(6, COUNT)]
    assert (captioned.pictures, captioned.errors) == (len(again.asked), len(again.asked))
    assert content(out) == content(tmp_path / "whole" / name)
    assert [row["error"] for row in rows(out)] == [f"row {n}" for n in range(COUNT)]
    last, captioned = count_all(out, pictures)
    assert last.asked == [] and captioned.written == 0 and content(out) == content(tmp_path / "whole" / name)


def content(out: Path) -> dict[str, bytes]:
    """Every file beside and in an output."""
    return {
        str(p.relative_to(out.parent)): p.read_bytes() for p in sorted(out.parent.rglob("*")) if p.is_file()
    }


def test_a_kill_behind_the_one_file_leaves_nothing(
    pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "captions.parquet"
    with monkeypatch.context() as patch:
        patch.setattr("vlmexport.runtime.captioning.output.shutil.rmtree", lambda *a, **k: None)
        count_all(out, pictures)
    assert len(list(tmp_path.iterdir())) == 2
    count_all(out, pictures)
    assert list(tmp_path.iterdir()) == [out]


def test_outputs_of_others_are_refused(pictures: list[Path], tmp_path: Path):
    other, damaged, plain = (tmp_path / name for name in ("other.parquet", "damaged.parquet", "plain"))
    parquet.write_table(pa.table({"a": [1]}), other)
    damaged.write_bytes(b"PAR1")
    plain.write_text("")
    for path, said in (
        (other, "holds captions with run = None, not 1"),
        (damaged, "cannot be read"),
        (plain, "is a file; name a folder for shards"),
    ):
        before = path.read_bytes()
        with pytest.raises(OptionError, match=said):
            count_all(path, pictures)
        assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 3
    held = tmp_path / "held"
    held.mkdir()
    with only_one(held / LOCK), pytest.raises(OptionError, match=f"another process writes to {held}"):
        count_all(held, pictures)


def test_nothing_is_loaded_for_an_empty_part(tmp_path: Path, pictures: list[Path]):
    def load() -> Any:
        raise AssertionError("there is nothing to caption")

    empty = next(n for n in range(400) if not any(Part(n, 400).holds(str(path)) for path in pictures))
    output = Output(tmp_path / "out", {})
    with output.claimed():
        made = caption_all(SessionCaptioner(load, None, {}), Index(pictures), output, 4, Part(empty, 400))
    assert (made.rows, made.shards, made.written) == (0, 1, 1) and rows(tmp_path / "out") == []


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    with monkeypatch.context() as patch:
        patch.setattr("vlmexport.runtime.common.optional_deps.importlib.util.find_spec", lambda name: None)
        assert caption("bundle", "pictures", "-o", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "`vlmexport caption` needs the extra [parquet] (pyarrow is missing): pip install" in said
