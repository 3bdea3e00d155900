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
from training_targets import make_jsonl, make_target
from vlmexport.exporter.drafts import open_draft

SCRIPT = """
import json, sys
from pathlib import Path
from accelerate import PartialState
from vlmexport.calibration.data import load_records
from vlmexport.calibration.targets.target import load_target
from vlmexport.calibration.training import features
from vlmexport.calibration.training.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.training.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.training.options import LoopOptions
from vlmexport.calibration.training.run import train_draft

folder, whole, seen = Path(sys.argv[1]), features.LiveFeatures.rows, []

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
"""

TRAININGS = {"uneven": ("data.jsonl", 5, "imitation"), "single": ("data.jsonl", 1, "imitation"),
             "joint": ("alike.jsonl", 4, "joint"), "stages": ("alike.jsonl", 4, "stages"), "heads": ("alike.jsonl", 4, "trimmed")}  # fmt: skip
"""Data, records of a batch, and what is trained. Each launch trains them one after another: most of it is imports."""


def launch(folder: Path, processes: int) -> None:
    """All trainings, with so many processes."""
    jobs = [(f"{name}-{processes}", *training) for name, training in TRAININGS.items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        str(folder / "script.py"), str(folder), json.dumps(jobs),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-9000:]


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
        launch(folder, processes)
    return folder


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
