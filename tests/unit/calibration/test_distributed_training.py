"""Several processes (`torchrun`) share every batch and make the draft that one makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vlmexport.calibration.data import load_records
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import load_target
from vlmexport.calibration.training.run import Schedule, train_draft
from vlmexport.exporter.drafts.common.files import read_document
from vlmexport.exporter.drafts.folders import open_draft

from tests.support.training_targets import make_jsonl, make_target

SCRIPT = """
import json, sys
from pathlib import Path
from vlmexport.runtime.cli import main

folder, count = Path(sys.argv[1]), int(sys.argv[3])
given = ["--model", folder / "model", "--data", folder / "data.jsonl", "--validation", folder / "data.jsonl"]
options = ["--draft-layer", 2, "--steps", 6, "--batch-size", 5, "--lr", "3e-3", "--warmup", 2]
options += ["--cache-features", folder / f"cache-{count}"]  # which the first makes for all
assert main([str(word) for word in ["train", "-v", *given, *options, "-o", folder / f"command-{count}"]]) == 0

from accelerate import PartialState
from vlmexport.calibration.data import load_records
from vlmexport.calibration.targets.target import load_target
from vlmexport.calibration.features import features
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.training.run import Schedule, train_draft
from vlmexport.calibration.training.trainer import Trainer

whole, seen, trained = features.LiveFeatures.rows, [], Trainer.train

def rows(self, indices):
    if self.records.name == "train":
        seen.append(list(indices))
    return whole(self, indices)

features.LiveFeatures.rows = rows
KINDS = {
    "imitation": ImitationOptions(2, cosine=1.0),
    "joint": MedusaOptions(heads=2, joint=True, warm_up_heads=2),
    "stages": ImitationOptions(2, cosine=1.0, fusion="concat", fine_tune=2, joint=True, joint_steps=2),
    "trimmed": MedusaOptions(heads=2, head="trimmed", head_vocabulary=16),
}
for out, data, batch, kind in json.loads(sys.argv[2]):
    seen.clear()
    train, held = load_records(str(folder / data)).split(0.2)
    train.name = "train"
    loop = LoopOptions(6, batch, lr=3e-3, warmup=2)
    train_draft(load_target(str(folder / "model")), train, KINDS[kind], loop, folder / out, held)
    (folder / f"{out}-{PartialState().process_index}.json").write_text(json.dumps(seen))

# One process begins what two go on with, and two begin what a test goes on with alone.
for name, stop in [("grown", 3)] if count == 1 else [("grown", None), ("shrunk", 3)]:
    train, held = load_records(str(folder / "data.jsonl")).split(0.2)
    Trainer.train = lambda self, restart: trained(self, restart, stop)
    loop, target = LoopOptions(6, 5, lr=3e-3, warmup=2), load_target(str(folder / "model"))
    train_draft(target, train, KINDS["imitation"], loop, folder / name, held, schedule=Schedule(save_every=3))
"""

TRAININGS = {"uneven": ("data.jsonl", 5, "imitation"), "single": ("data.jsonl", 1, "imitation"),
             "joint": ("alike.jsonl", 4, "joint"), "stages": ("alike.jsonl", 4, "stages"), "heads": ("alike.jsonl", 4, "trimmed")}  # fmt: skip
"""Data, records of a batch, and what is trained. Each launch trains them one after another: most of it is imports."""


def launch(folder: Path, processes: int) -> str:
    """All trainings, with so many processes; what they said on stderr."""
    jobs = [(f"{name}-{processes}", *training) for name, training in TRAININGS.items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        str(folder / "script.py"), str(folder), json.dumps(jobs), str(processes),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-9000:]
    return done.stderr


def made(folder: Path, name: str, processes: int) -> tuple[dict[str, torch.Tensor], list[list[list[int]]]]:
    """The last draft's weights, and which records each process read in each step."""
    out = folder / f"{name}-{processes}"
    seen = [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(processes)]
    return open_draft(out / "last").network.state_dict(), seen  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    make_target("llama", folder / "model")
    make_jsonl(folder / "data.jsonl", 12, images=False)
    lines = (folder / "data.jsonl").read_text().splitlines()
    for number in (1, 4):  # answers of different lengths: processes have different numbers of rows
        record = json.loads(lines[number])
        lines[number] = json.dumps({**record, "answer": f"{record['answer']} {record['answer']} cup"})
    (folder / "data.jsonl").write_text("\n".join(lines))
    (folder / "script.py").write_text(SCRIPT)
    words = [("cup", "box", "blue", "you"), ("box", "cup", "you", "blue"), ("you", "blue", "cup", "box")]
    alike = [
        {"prompt": "see", "answer": " ".join(words[i % 3][i // 3 :] + words[i % 3][: i // 3])}
        for i in range(12)
    ]
    (folder / "alike.jsonl").write_text("\n".join(map(json.dumps, alike)))
    for processes in (1, 2):
        (folder / f"stderr-{processes}").write_text(launch(folder, processes))
    return folder


def test_the_command_shares_its_batches_on_the_default_device(folder: Path):
    one, two = (open_draft(folder / f"command-{n}" / "last").network.state_dict() for n in (1, 2))  # type: ignore[attr-defined]
    for name, weights in one.items():
        torch.testing.assert_close(two[name], weights, rtol=1e-4, atol=1e-6)
    assert not all(torch.equal(two[name], one[name]) for name in one), "both are of one process"


@pytest.mark.parametrize("count", [1, 2])
def test_the_command_says_once_how_many_processes_there_are(folder: Path, count: int):
    made = read_document(folder / f"command-{count}" / "best")["provenance"]["processes"]
    said = [
        line.partition(" s  ")[2]
        for line in (folder / f"stderr-{count}").read_text().splitlines()
        if " s  " in line
    ]
    assert made == count
    assert said[0] == ("1 process on cpu" if count == 1 else "2 processes on cpu (gloo)")
    ended = 1 + len(TRAININGS) + (count == 2)  # what one process begins, two end
    assert (folder / f"stderr-{count}").read_text().count("validation loss") == ended
    logged = (folder / f"command-{count}" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in logged] == ["train", "validation"]


def test_resume_with_another_number_of_processes(folder: Path):
    alone, _ = made(folder, "uneven", 1)
    train, held = load_records(str(folder / "data.jsonl")).split(0.2)
    options = ImitationOptions(2, cosine=1.0), LoopOptions(6, 5, lr=3e-3, warmup=2)
    train_draft(
        load_target(folder / "model"),
        train,
        *options,
        folder / "shrunk",
        held,
        schedule=Schedule(save_every=3),
    )
    for name, count in (("grown", 2), ("shrunk", 1)):
        draft = folder / name / "last"
        found = open_draft(draft).network.state_dict()  # type: ignore[attr-defined]
        assert read_document(draft)["provenance"]["processes"] == count
        for tensor, weights in alone.items():
            torch.testing.assert_close(found[tensor], weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["uneven", "single", "heads"],
    ids=["a batch that is not even", "a process without a record", "heads with a vocabulary of their own"],
)
def test_processes_share_every_batch_and_make_one_draft(folder: Path, name: str):
    batch = TRAININGS[name][1]
    alone, (read,) = made(folder, name, 1)
    together, (first, second) = made(folder, name, 2)
    assert len(read) == len(first) == 6 and all(len(step) == batch for step in read)
    assert len(second) == (6 if batch > 1 else 0)
    for step, whole in enumerate(read):
        parts = first[step] + (second[step] if batch > 1 else [])
        assert sorted(parts) == sorted(whole), "each record once"
    for name, weights in alone.items():
        torch.testing.assert_close(together[name], weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["joint", "stages"])
def test_processes_change_a_target_as_one_does(folder: Path, name: str):
    """Of answers of one length, for the mean over a head's tokens is taken in each process."""
    alone, _ = made(folder, name, 1)
    together, _ = made(folder, name, 2)
    for tensor, weights in alone.items():
        torch.testing.assert_close(together[tensor], weights, rtol=1e-3, atol=1e-5)
    first, second, one = (
        load_file(place / "model.safetensors")
        for place in (
            folder / f"{name}-1/last/model",
            folder / f"{name}-2/last/model",
            folder / "model",
        )
    )
    for tensor, value in first.items():
        torch.testing.assert_close(second[tensor], value, rtol=1e-3, atol=1e-5)
    assert not torch.equal(first["lm_head.weight"], one["lm_head.weight"])
