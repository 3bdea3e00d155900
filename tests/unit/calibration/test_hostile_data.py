"""Data, options and disks that cannot work cost one line, whoever made them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from vlmexport.calibration.data import ImageRef, Record, load_records
from vlmexport.calibration.data.reading.lines import LONGEST_LINE
from vlmexport.calibration.features.features import build_cache
from vlmexport.calibration.targets.devices import find_device
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.calibration.training.run import Schedule, train_draft, usable_records
from vlmexport.exporter.drafts.common import files as draft_files
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import DivergedError, InputError, OptionError

from tests.support.training_targets import make_records, make_target, options


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target("blip2-t5", tmp_path_factory.mktemp("hostile") / "model")


def one_line(capfd: pytest.CaptureFixture, *words: object) -> str:
    """What the command says when it fails."""
    capfd.readouterr()
    status = main([str(word) for word in words])
    out, err = capfd.readouterr()
    lines = [line for line in err.strip().splitlines() if not line.startswith("skipped ")]
    assert status == 2 and out == "" and len(lines) == 1, err
    return lines[0]


# --- data ---


def test_malformed_lines_are_bad_records(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        '{"prompt": "\\ud800 cup"}',
        '{"prompt": "a", "answer": "\\udfff"}',
        "[" * 100_000,
        '{"prompt": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
        '{"prompt": "' + "x" * 1_000_001 + '"}',
        '{"prompt": "fine"}',
    ]
    path.write_text("\n".join(lines))
    found = load_records(str(path))
    assert [(r.key, r.prompt) for r in found] == [("line-6", "fine")]
    assert [p.split(": ")[0] for p in found.problems] == [f"{path}:{n}" for n in (1, 2, 3, 4, 5)]
    for problem, words in zip(
        found.problems, ("U+D800", "'answer'", "nested too deep", "nested too deep", "1000001"), strict=True
    ):
        assert words in problem and "\n" not in problem


def test_a_line_of_100_mb_takes_no_memory(tmp_path: Path) -> None:
    """In 1.5 GB of address space: parsed, the line would take 7 GB."""
    path = tmp_path / "data.jsonl"
    with path.open("wb") as out:
        out.write(b'{"prompt": [')
        for _ in range(100):
            out.write(b"[],[" * (1 << 18))
        out.write(b'"]}\n{"prompt": "fine"}\n')
    code = (
        "import re; from vlmexport.calibration.data import load_records;"
        f"found = load_records({str(path)!r});"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1];"
        "print(len(found), int(peak) >> 10)"
    )
    if not Path("/proc/self/status").is_file():
        pytest.skip("reads /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    records, peak = map(int, done.stdout.split())
    assert records == 1 and peak < 400, f"{peak} MiB"
    assert f"data.jsonl:1: the line has more than {LONGEST_LINE >> 20} MiB" in done.stderr


def test_shards_are_read_as_carefully(tmp_path: Path) -> None:
    meta = {"target": {"name": "t", "fingerprint": "f"}, "shards": 1}
    (tmp_path / "generated.json").write_text(json.dumps(meta))
    good = {"key": "a", "prompt": "p", "image": None, "tokens": [1, 2], "text": "x"}
    lines = [json.dumps(good), "[" * 100_000, json.dumps({**good, "prompt": "\ud800"})]
    (tmp_path / "shard-00000.jsonl").write_text("\n".join(lines))
    found = load_records(str(tmp_path))
    assert len(found) == 1 and len(found.problems) == 2
    for damage in ("[" * 100_000, "[]", "3", '{"shards": []}'):
        (tmp_path / "generated.json").write_text(damage)
        with pytest.raises(OptionError, match=r"generated\.json (cannot be read|is not JSON)"):
            load_records(str(tmp_path))


COCO = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "caption": "a cup"}]}
KARPATHY = {"images": [{"filename": "a.png", "sentences": [{"raw": "a cup"}]}]}


@pytest.mark.parametrize(
    "document",
    [
        "[" * 100_000, "3", {"images": 3}, {**COCO, "annotations": 3}, {**COCO, "annotations": [3, {"image_id": []}]},
        {**COCO, "images": [{"id": [], "file_name": "a.png"}]}, {**COCO, "images": [{"id": 1, "file_name": 3}]},
        {"images": [{"filename": "a.png", "sentences": [3]}]}, {"images": [{"filename": "a.png", "sentences": {}}]},
        {"images": [{"filename": "\0", "sentences": [{"raw": "a"}]}]},
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_captions_of_the_wrong_types(document: object, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    path = tmp_path / "captions.json"
    for good in (COCO, KARPATHY):
        path.write_text(json.dumps(good))
        assert [r.answer for r in load_records(f"coco:{path},{tmp_path}")] == ["a cup"]
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(OptionError) as caught:
        load_records(f"coco:{path},{tmp_path}")
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"image": {"scene": [-1, 2]}}, {"image": {"scene": [True, 2]}}, {"image": {"scene": [1 << 80, 2]}},
     {"tokens": [True]}, {"tokens": [-1]}, {"tokens": 3}, {"image": 3}],
    ids=str,
)  # fmt: skip
def test_invalid_generated_records_are_refused(change: dict, tmp_path: Path) -> None:
    meta = {"target": {"name": "t", "fingerprint": "f"}, "shards": 1}
    (tmp_path / "generated.json").write_text(json.dumps(meta))
    good = {"key": "a", "prompt": "p", "image": None, "tokens": [1, 2], "text": "x"}
    (tmp_path / "shard-00000.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}))
    found = load_records(str(tmp_path))
    assert len(found) == 1 and len(found.problems) == 1


def test_tokens_beyond_the_vocabulary_are_refused(target: Target, tmp_path: Path) -> None:
    records = make_records(tmp_path, "blip2-t5", 2)
    bad = Record("bad", "what?", records[0].image, tokens=(1, target.vocabulary))
    with pytest.raises(InputError, match=rf"record bad has the token {target.vocabulary}; model knows"):
        usable_records(target, type(records)("set", [*records, bad]))


def test_a_typed_image_token_is_refused_before_training(target: Target, tmp_path: Path) -> None:
    records = make_records(tmp_path, "blip2-t5", 3)
    for name, what in (("prompt", "prompt"), ("answer", "text")):
        values = {"prompt": "what?", "answer": "a cup", name: "what is <image> here"}
        bad = Record("bad", image=records[0].image, **values)
        with pytest.raises(InputError, match=f"record bad: the {what} contains '<image>'.*leave it out"):
            usable_records(target, type(records)("set", [*records, bad]))
    with pytest.raises(InputError, match="contains '<image>'"):
        target.prompt(Record("bad", "<image>", ImageRef(scene=(0, 0))))


# --- options ---


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "--device cuda: PyTorch .* finds no GPU here; give --device cpu"),
        ("cuda:7", "--device cuda:7: PyTorch .* finds no GPU"),
        ("gpu", "--device 'gpu' is not auto, cpu or"),
        ("", "--device '' is not auto, cpu or"),
        ("meta", "--device meta is not auto, cpu or"),
    ],
)
def test_missing_devices_are_refused(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=message):
        load_target("no/such/model", device)
    assert find_device("cpu") == torch.device("cpu")


def test_gpu_index_out_of_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(OptionError, match=r"--device cuda:1: .* finds 1 GPU\(s\) here"):
        find_device("cuda:1")


@pytest.mark.parametrize("command", ["train", "generate-data", "eval"])
def test_cuda_without_cuda_is_one_line(
    command: str,
    target: Target,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    more = ["--draft", "early-exit@1"] if command == "eval" else ["-o", tmp_path / "out"]
    more += ["--draft-layer", 1] if command == "train" else []
    said = one_line(
        capfd, command, "--model", target.checkpoint.folder, "--data", "scenes:train:2", "--device", "cuda",
        *more,
    )  # fmt: skip
    assert "finds no GPU here" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("steps", [6, 1])
def test_diverging_learning_rate_is_reported(target: Target, tmp_path: Path, steps: int) -> None:
    records = make_records(tmp_path, "blip2-t5", 6)
    own, loop = options(2, steps=steps, lr=1e30, warmup=0)
    with pytest.raises(
        DivergedError, match=r"the loss is (NaN|infinite) at step \d: lower --lr \(it was .e\+3"
    ):
        train_draft(target, records, own, loop, tmp_path / "run")
    with pytest.raises(OptionError, match=r"--lr must be at most 1e\+30, not inf"):
        options(2, lr=float("inf"))


# --- full disks ---


@pytest.mark.parametrize("what", ["state", "draft", "cache"])
def test_a_full_disk_ends_training_in_one_line_and_leaves_no_half_of_a_file(
    what: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of this process may not grow beyond some bytes, and the system says so while one is written."""
    records, out = make_records(tmp_path, "blip2-t5", 6), tmp_path / "run"
    own, loop = options(2, steps=4, lr=1e-3)
    draft = train_draft(target, records, own, loop, out, schedule=Schedule(save_every=2))
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and "tensorboard" not in p.parts}
    longer = options(2, steps=4, lr=2e-3)[1]
    cache = tmp_path / "cache" if what == "cache" else None
    sizes = {"state": 9000, "draft": 400, "cache": 3000}
    if what == "draft":
        monkeypatch.setattr("vlmexport.calibration.training.trainer.save_state", lambda *_: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[what], hard))
    try:
        with pytest.raises(OptionError, match=r"no space left on the disk of .*the same command continues"):
            train_draft(
                target, records, own, longer, out, cache=cache, schedule=Schedule(save_every=1, restart=True)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.rglob("*.new"))
    state = out / "state.pt"
    # `restart` forgets the old state at once: a kill behind it does not go on with what was to be forgotten.
    assert not state.exists() if what == "state" else state.read_bytes() == before[state]
    assert draft.name == "imitation@2"


def test_a_mapped_cache_has_its_space_before_it_is_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that does not fit the disk would kill the process."""
    records, reserved = make_records(tmp_path, "blip2-t5", 4), []
    allocate = os.posix_fallocate

    def spy(descriptor: int, offset: int, size: int) -> None:
        reserved.append(size)
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", spy)
    place = build_cache(target, records, [2], tmp_path / "cache")
    assert sorted(reserved) == sorted(p.stat().st_size for p in place.glob("*.bin"))


def test_a_draft_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_files.write_document(tmp_path, {"kind": "imitation"})
    before = (tmp_path / "draft.json").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        draft_files.write_document(tmp_path, {"kind": "other"})
    assert [p.name for p in tmp_path.iterdir()] == ["draft.json"]
    assert (tmp_path / "draft.json").read_bytes() == before
