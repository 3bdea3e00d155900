"""`generate-data --part I/N` and `--join`: parts that are answered apart become the data of one run."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from vlmexport import calibration
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.data.generated import META, shard_name
from vlmexport.calibration.data.reading.records import Record
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.calibration.generation.generate import Generated, generate_data
from vlmexport.calibration.generation.join import join_parts
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import InputError, OptionError
from vlmexport.runtime.common.parts import Part, read_part

from tests.support.training_targets import make_target

RECORDS = RecordSet("told", [Record(f"line-{i}", f"say {i}") for i in range(23)])
SCHEMA = Path(calibration.__file__).parent / "schemas" / "generate-data-join-1.json"


class Told:
    """Answers that are functions of the record and the sample; line-4 cannot be answered. Ends after `last` records."""

    name, engine, fingerprint = "told", "runtime", f"sha256:{'0' * 64}"

    def __init__(self, last: int | None = None, fingerprint: str = fingerprint) -> None:
        self.last, self.fingerprint = last, fingerprint
        self.asked: list[str] = []

    def answer(self, records: Sequence[Record], options: GenerationOptions):
        places = list(range(len(records)))
        random.Random(3).shuffle(places)  # answers come in any order
        for place in places:
            if len(self.asked) == self.last:
                raise KeyboardInterrupt
            key = records[place].key
            self.asked.append(key)
            number = int(key.partition("-")[2])
            if number == 4:
                yield place, InputError("no picture")
            else:
                yield place, [(number, sample, 1) for sample in range(options.samples)]

    def is_cut(self, answer: Sequence[int]) -> bool:
        return False

    def text(self, answer: Sequence[int]) -> str:
        return f"é {answer[0]}"


DRAWN = GenerationOptions(8, temperature=1.0, samples=2)


def write(out: Path, part: Part | None, answers: Told | None = None, **more: Any) -> Generated:
    given = {"options": DRAWN, "shard_size": 5, "report": lambda line: None} | more
    return generate_data(answers or Told(), given.pop("records", RECORDS), out, part=part, **given)


def parts(folder: Path, count: int, **more: Any) -> list[Path]:
    """Folders of all parts."""
    made = [folder / f"part-{i}" for i in range(count)]
    for number, path in enumerate(made):
        write(path, Part(number, count), **more)
    return made


def content(folder: Path) -> dict[str, Any]:
    """Every file, the description without what tells who wrote it when."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    described = json.loads(found[META])
    found[META] = list({n: v for n, v in described.items() if n != "provenance"}.items())
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    write(folder, None)
    return content(folder)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_joined_parts_are_the_data_of_one_run(tmp_path: Path, whole: dict[str, Any], count: int):
    """In any order; of 40 parts some have no record."""
    made = parts(tmp_path, count)
    random.Random(1).shuffle(made)
    report = join_parts(made, tmp_path / "joined")
    assert content(tmp_path / "joined") == whole
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(report)
    assert (report["parts"], report["records"], report["shards"], report["answers"]) == (count, 23, 5, 44)
    assert [r.key for r in load_records(str(tmp_path / "joined"))][:4] == [
        "line-0", "line-0#1", "line-1", "line-1#1",
    ]  # fmt: skip
    join_parts(made, tmp_path / "joined")  # the same data: written again
    assert content(tmp_path / "joined") == whole


def test_each_record_belongs_to_one_part_and_parts_are_alike(tmp_path: Path):
    keys = [f"line-{i}" for i in range(4000)]
    held = [[key for key in keys if Part(n, 8).holds(key)] for n in range(8)]
    assert sorted(key for part in held for key in part) == sorted(keys)
    assert all(430 < len(part) < 570 for part in held), "500 each, four standard deviations at most"
    assert Part(3, 8).holds("line-1") == Part(3, 8).holds("line-1") and Part(0, 1).holds("\udc80")
    answers = Told()
    write(tmp_path, Part(1, 3), answers)
    assert sorted(answers.asked) == sorted(r.key for r in RECORDS if Part(1, 3).holds(r.key))


def test_a_killed_part_is_continued_by_itself(tmp_path: Path, whole: dict[str, Any]):
    made = parts(tmp_path, 2)
    killed, again = Told(last=9), Told()
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "killed", Part(1, 2), killed, shard_size=2)
    begun = sorted((tmp_path / "killed").glob("shard-*"))
    assert 0 < len(begun) < 6
    with pytest.raises(OptionError, match=r"killed \(part 1/2\) is not finished: it misses shard-\d+\.jsonl"):
        join_parts([made[0], tmp_path / "killed"], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()
    assert write(tmp_path / "killed", Part(1, 2), again, shard_size=2).written > 0
    assert len(again.asked) < sum(Part(1, 2).holds(r.key) for r in RECORDS)
    other = tmp_path / "other"
    write(other, Part(0, 2), shard_size=2)
    join_parts([tmp_path / "killed", other], tmp_path / "joined")
    lines = [
        b"".join(v for n, v in found.items() if n != META) for found in (content(tmp_path / "joined"), whole)
    ]
    assert lines[0] == lines[1]


def test_a_part_of_bad_records_alone_is_finished(tmp_path: Path, whole: dict[str, Any]):
    """Of 40 parts one has line-4 and no other record; a whole run of it would be taken for a mistake."""
    only = RecordSet("bad", [RECORDS[4]])
    with pytest.raises(InputError, match="none of the first 1 record"):
        write(tmp_path / "whole", None, records=only)
    assert write(tmp_path / "part", Part(0, 1), records=only).skipped == 1


def refusal(folders: Sequence[Path], out: Path) -> str:
    with pytest.raises(OptionError) as caught:
        join_parts(folders, out)
    assert not (out / META).exists() and "\n" not in str(caught.value)
    return str(caught.value)


def test_parts_that_do_not_belong_together_are_refused_by_name(tmp_path: Path):
    a, b, c = parts(tmp_path / "three", 3)
    out = tmp_path / "out"
    assert "part 1/3, 2/3 is missing: give the folders of all 3" in refusal([a], out)
    assert f"{b} and {tmp_path / 'copy'} are both part 1/3" in refusal(
        [a, b, _copied(b, tmp_path / "copy"), c], out
    )
    fewer = parts(tmp_path / "two", 2)
    assert f"{a} is part 0/3 and {fewer[1]} is part 1/2" in refusal([a, fewer[1], c], out)
    others: dict[str, dict[str, Any]] = {
        "max_new_tokens": {"options": GenerationOptions(9, 1.0, 2)},
        "sampling": {"options": GenerationOptions(8, 1.0, 2, seed=5)},
        "min_answer": {"options": GenerationOptions(8, 1.0, 2, min_answer=2)},
        "shard_size": {"shard_size": 4},
        "target": {"answers": Told(fingerprint=f"sha256:{'1' * 64}")},
        "data": {"records": RecordSet("others", list(RECORDS))},
        "identity": {"records": RecordSet("told", [*RECORDS[:22], Record("line-22", "other words")])},
    }
    for name, given in others.items():
        write(tmp_path / name, Part(1, 3), **given)
        said = refusal([a, tmp_path / name, c], out)
        assert f"{a} holds a part of a run with {name} = " in said and f"{tmp_path / name} one with" in said


def _copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_other_folders_and_changed_files_are_refused(tmp_path: Path):
    made = parts(tmp_path, 2)
    out = tmp_path / "out"
    write(tmp_path / "plain", None)
    assert "plain holds no part: it was written without --part" in refusal([made[0], tmp_path / "plain"], out)
    assert "cannot be read" in refusal([made[0], tmp_path / "nowhere"], out)
    shard = made[1] / shard_name(0)
    lines = shard.read_text("utf-8").splitlines(keepends=True)
    for changed in (lines[::-1], [*lines[:1], '{"key": "x"}\n'], [*lines[:1], "[]\n"], [*lines[:1], "{\n"]):
        shard.write_text("".join(changed), "utf-8")
        said = refusal(made, out)
        assert str(shard) in said and "the file was changed" in said
    described = json.loads((made[1] / META).read_text())
    for wrong in ({"part": "2/2"}, {"part": 3}, {"whole": {}}, {"shards": "x"}, {"shard_size": 0}):
        (made[1] / META).write_text(json.dumps(described | wrong))
        assert f"{made[1] / META} cannot be read" in refusal(made, out)


def test_a_folder_of_other_data_is_not_replaced(tmp_path: Path):
    made = parts(tmp_path, 2)
    write(tmp_path / "plain", None, options=GenerationOptions(7))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for name in ("plain", "mine"):
        before = sorted((tmp_path / name).iterdir())
        with pytest.raises(OptionError, match=f"{name} exists; choose another -o"):
            join_parts(made, tmp_path / name)
        assert sorted((tmp_path / name).iterdir()) == before


def test_a_part_and_a_whole_run_do_not_share_a_folder(tmp_path: Path):
    write(tmp_path / "part", Part(0, 2))
    write(tmp_path / "whole", None)
    with pytest.raises(OptionError, match="part = '0/2', not None"):
        write(tmp_path / "part", None)
    with pytest.raises(OptionError, match="part = '0/2', not '1/2'"):
        write(tmp_path / "part", Part(1, 2))
    with pytest.raises(OptionError, match="part = None, not '0/2'"):
        write(tmp_path / "whole", Part(0, 2))


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "-1/2", "1/2/3", "0.5/2", "a/b", "1/99999999", "٣/٤"])
def test_what_is_no_part_is_refused(text: str):
    with pytest.raises(OptionError, match="is not I/N, such as 0/4"):
        read_part("--part", text)


def test_parts_outside_their_number_are_refused():
    for text, said in (("2/2", "the parts are 0/2 to 1/2"), ("0/0", "there are 1 to 1,048,576 parts")):
        with pytest.raises(OptionError, match=f"--part {text}: {said}"):
            read_part("--part", text)
    assert str(read_part("--part", "03/08")) == "3/8"


def test_the_command_answers_parts_and_joins_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = make_target("blip2-t5", tmp_path / "model").checkpoint.folder

    def call(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in ("generate-data", *words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    asked = [
        "--model", model, "--data", "scenes:train:9", "--max-new-tokens", 6, "--shard-size", 4, "--device", "cpu",
        "--engine", "torch",
    ]  # fmt: skip
    made = [tmp_path / name for name in ("zero", "one", "two")]
    assert call(*asked, "-o", tmp_path / "whole")[0] == 0
    for number, folder in enumerate(made):
        status, out, _ = call(*asked, "--part", f"{number}/3", "-o", folder, "--json")
        assert status == 0 and json.loads(out)["part"] == f"{number}/3"
    assert call("--join", *made[::-1], "-o", tmp_path / "joined") == (0, f"data: {tmp_path / 'joined'}\n", "")
    assert content(tmp_path / "joined") == content(tmp_path / "whole")
    assert json.loads(call("--join", *made, "-o", tmp_path / "joined", "--json")[1])["status"] == "joined"
    for words, said in (
        (["--join", *made, "--data", "x", "--max-new-tokens", "9"], "leave --data and --max-new-tokens out"),
        (["--join"], "--join names no folder"),
        ([made[0]], f"{made[0]}: generate-data takes no argument without --join"),
        (["--model", model], "generate-data needs --data; only --join does without"),
        ([*asked, "--part", "3/3"], "--part 3/3: the parts are 0/3 to 2/3"),
    ):
        status, _, err = call(*words, "-o", tmp_path / "new")
        assert status == 2 and said in err and not (tmp_path / "new").exists()
