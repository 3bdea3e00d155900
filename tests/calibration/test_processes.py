"""Several processes (`torchrun`) share every batch and make the draft that one makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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
from vlmexport.calibration.training.options import LoopOptions
from vlmexport.calibration.training.run import train_draft

model, data, out, batch = sys.argv[1:]
target, whole = load_target(model), features.LiveFeatures.rows
seen = []

def rows(self, indices):
    if self.records.name == "train":
        seen.append(list(indices))
    return whole(self, indices)

features.LiveFeatures.rows = rows
train, held = load_records(data).split(0.2)
train.name = "train"
loop = LoopOptions(6, int(batch), lr=3e-3, warmup=2)
train_draft(target, train, ImitationOptions(2, cosine=1.0), loop, Path(out), held)
Path(f"{out}-{PartialState().process_index}.json").write_text(json.dumps(seen))
"""


def launch(folder: Path, processes: int, batch: int) -> tuple[dict[str, torch.Tensor], list[list[list[int]]]]:
    """The best draft's weights, and which records each process read in each step."""
    out = folder / f"run-{processes}-{batch}"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        str(folder / "script.py"), str(folder / "model"), str(folder / "data.jsonl"), str(out), str(batch),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-9000:]
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
    return folder


@pytest.mark.parametrize("batch", [5, 1], ids=["a batch that is not even", "a process without a record"])
def test_processes_share_every_batch_and_make_one_draft(folder: Path, batch: int):
    alone, (read,) = launch(folder, 1, batch)
    together, (first, second) = launch(folder, 2, batch)
    assert len(read) == len(first) == 6 and all(len(step) == batch for step in read)
    assert len(second) == (6 if batch > 1 else 0)
    for step, whole in enumerate(read):
        parts = first[step] + (second[step] if batch > 1 else [])
        assert sorted(parts) == sorted(whole), "each record once"
    for name, weights in alone.items():
        torch.testing.assert_close(together[name], weights, rtol=1e-4, atol=1e-6)
