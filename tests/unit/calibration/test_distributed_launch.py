"""What a launcher says of the processes of a training, and what becomes of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import typer
from accelerate import PartialState
from typer.testing import CliRunner
from vlmexport.calibration.cli import register
from vlmexport.calibration.common.processes import (
    RANKS,
    SIZES,
    check_shared,
    join_processes,
    launched_processes,
    run_alone,
    said_once,
    together,
)
from vlmexport.calibration.data import load_records
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.targets.devices import find_device
from vlmexport.calibration.training.run import source_for, train_draft
from vlmexport.calibration.training.trainer import Trainer
from vlmexport.exporter.drafts.common.files import read_document
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import LostProcessError, OptionError
from vlmexport.runtime.common.locks import only_one

from tests.support.training_targets import make_jsonl, make_target, options

LAUNCHED = {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"}
CPUS, MACHINES = "torchrun --nproc_per_node 2", "torchrun --nnodes 2"
"""How the commands of the documentation begin: for the CPUs of one machine, and for one of several machines."""
DOCUMENTED = Path(__file__).parents[3] / "docs" / "how-to" / "training-runs.md"


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher."""
    for name in (*SIZES, *RANKS, *LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({}, None),
        ({"MASTER_ADDR": "node7"}, None),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, None),
        ({"WORLD_SIZE": "1"}, 1),
        ({"WORLD_SIZE": "2", "RANK": "1"} | LAUNCHED, 2),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, 3),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"} | LAUNCHED, 4),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, 2),
        ({"WORLD_SIZE": "2", "PMI_SIZE": "8", "RANK": "0"}, 2),
    ],
)
def test_launcher_variables_are_read(said: Mapping[str, str], count: int | None):
    assert launched_processes(said) == count


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (LAUNCHED, "accelerate launch started one process and was asked for several"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE=2, and nothing says which .* \(RANK\)"),
        ({"PMI_SIZE": "2"}, "unset PMI_SIZE"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number of processes"),
        ({"WORLD_SIZE": "0"}, "'0' is not a number"),
        ({"WORLD_SIZE": "-1"}, "'-1' is not a number"),
        ({"WORLD_SIZE": "9" * 40}, "is not a number"),
    ],
)
def test_inconsistent_launcher_variables_are_refused(said: Mapping[str, str], message: str):
    with pytest.raises(OptionError, match=message) as caught:
        launched_processes(said)
    assert "torchrun --nproc_per_node" in str(caught.value) and "\n" not in str(caught.value)


def test_several_processes_that_accelerate_takes_for_one_are_refused(nobody: pytest.MonkeyPatch):
    join_processes(cpu=True)  # of this process alone
    nobody.setenv("WORLD_SIZE", "2")
    nobody.setenv("RANK", "0")
    for asked in ("auto", "cpu"):
        with pytest.raises(OptionError, match="started 2 processes and accelerate finds 1"):
            join_processes(cpu=find_device(asked).type == "cpu")


@pytest.mark.parametrize("command", ["search", "generate-data", "eval", "tune"])
def test_commands_of_one_process_are_refused_to_several(
    nobody: pytest.MonkeyPatch, tmp_path: Path, command: str
):
    app = typer.Typer()
    register(app)
    given = {"tune": [str(tmp_path)]}.get(command, ["--model", "nothing", "--data", "nothing"])
    words = [command, *given, *([] if command in ("eval", "tune") else ["-o", str(tmp_path / "out")])]
    nobody.setenv("WORLD_SIZE", "2")
    nobody.setenv("RANK", "0")
    with pytest.raises(OptionError, match=f"{command} runs in one process, and the launcher started 2"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    nobody.setenv("WORLD_SIZE", "1")
    run_alone(command)


def test_one_process_per_gpu(nobody: pytest.MonkeyPatch):
    nobody.setattr(torch.cuda, "is_available", lambda: True)
    nobody.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1") == torch.device("cuda:1")
    nobody.setenv("WORLD_SIZE", "2")
    nobody.setenv("RANK", "0")
    with pytest.raises(OptionError, match="--device cuda:1 is one GPU for all processes"):
        find_device("cuda:1")


def test_concurrent_runs_in_one_folder_are_refused(nobody: pytest.MonkeyPatch, tmp_path: Path):
    """Whatever started them: processes without a launcher that says so, or two terminals."""
    target = make_target("llama", tmp_path / "model")
    records = load_records(str(make_jsonl(tmp_path / "data.jsonl", 4, images=False)))
    given = options(2, steps=1, batch_size=2)
    with only_one(tmp_path / "out" / "lock"), pytest.raises(OptionError, match="another process writes to"):
        train_draft(target, records, *given, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]
    train_draft(target, records, *given, tmp_path / "out")


class Second:
    """The second of two processes."""

    num_processes, process_index, is_main_process = 2, 1, False


def test_lost_process_is_one_line(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RuntimeError, match="shapes differ") as caught, together():
        raise RuntimeError("shapes differ")
    assert not isinstance(caught.value, LostProcessError), "of one process nobody is lost"
    monkeypatch.setattr("accelerate.PartialState", Second)
    with (
        pytest.raises(LostProcessError, match=r"process 1 of 2 has lost another one.*the same command"),
        together(),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer\nmore")
    with pytest.raises(torch.OutOfMemoryError), together():
        raise torch.OutOfMemoryError("12 GB")


def test_a_folder_that_machines_do_not_share_is_refused(tmp_path: Path):
    (tmp_path / "lock").touch()
    check_shared(tmp_path, "lock")
    with pytest.raises(OptionError, match="does not see what the first one writes to"):
        check_shared(tmp_path / "elsewhere", "lock")


def test_every_process_and_step_draws_numbers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever was drawn before, so that a run that is continued draws what it would have drawn."""
    target = make_target("llama", tmp_path / "model")
    records = load_records(str(make_jsonl(tmp_path / "data.jsonl", 4, images=False)))
    own, loop = options(2, steps=4, batch_size=2)
    source = source_for(target, records, own)
    drawn: dict[tuple[int, ...], float] = {}
    place: tuple[int, ...] = ()

    def draw(indices: list[int]) -> list[int]:
        drawn[place] = torch.rand(()).item()
        return []  # nothing to learn from

    monkeypatch.setattr(source, "rows", draw)
    optimizer = SimpleNamespace(param_groups=[])
    made = Trainer(partial(objective_for, own), loop, target, source, source, "data", tmp_path / "out")
    for count in (2, 1):
        for rank in range(count):
            given: Any = SimpleNamespace(num_processes=count, process_index=rank, device="cpu")
            made.accelerator = given
            for made.step in (0, 1):
                for state in (1, 2):
                    place = count, rank, made.step, state
                    torch.manual_seed(state)
                    made._one_step(optimizer)
    two = {key: value for key, value in drawn.items() if key[0] == 2}
    assert len(set(two.values())) == 4 and all(two[2, r, s, 1] == two[2, r, s, 2] for _, r, s, _ in two)
    assert drawn[1, 0, 0, 1] == drawn[1, 0, 1, 1] != drawn[1, 0, 0, 2], (
        "one process goes on from its own state"
    )


def test_only_the_first_process_logs(capsys: pytest.CaptureFixture[str]):
    second: Any = Second()
    with said_once(second):
        print("from all", file=sys.stderr)
    with said_once(PartialState(cpu=True)):
        print("from the first", file=sys.stderr)
    print("behind", file=sys.stderr)
    assert capsys.readouterr().err == "from the first\nbehind\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launching")
    make_target("llama", folder / "model")
    make_jsonl(folder / "data.jsonl", 12, images=False)
    return folder


def documented(folder: Path, out: str, *more: str, launch: str = CPUS, **places: str) -> list[str]:
    """A command of the documentation, with this model and data, and what stands for its places."""
    (line,) = re.findall(rf"^{launch} .*$", DOCUMENTED.read_text("utf-8"), re.MULTILINE)
    given = {
        "torchrun": f"{sys.executable} -m torch.distributed.run {'--standalone' * (launch == CPUS)}",
        "MODEL": str(folder / "model"), "N": "2", "runs/answers": str(folder / "data.jsonl"),
        "runs/draft": str(folder / out),
    } | places  # fmt: skip
    words = " ".join(given.get(word, word) for word in line.split()).split()
    return [*words, "--batch-size", "5", "--lr", "3e-3", "--warmup", "2", *more]


def unlaunched() -> dict[str, str]:
    """The environment without what a launcher of this test would have said."""
    return {k: v for k, v in os.environ.items() if k not in (*SIZES, *RANKS, *LAUNCHED)} | {
        "OMP_NUM_THREADS": "1"
    }


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=unlaunched(), capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, torch.Tensor]:
    """The draft that the documented command makes without a launcher, six steps, in this process."""
    command = documented(folder, "alone", "--steps", "6")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*SIZES, *RANKS, *LAUNCHED):
            patch.delenv(name, raising=False)
        assert main(command[command.index("-m", 3) + 2 :]) == 0
    assert read_document(folder / "alone" / "last")["provenance"]["processes"] == 1
    return weights(folder / "alone")


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the last draft of a run."""
    return open_draft(run / "last").network.state_dict()  # type: ignore[attr-defined]


def check_same_draft(run: Path, alone: dict[str, torch.Tensor]) -> None:
    """The draft of two processes, which is that of one but for the order of sums: gradients differ by a few units of
    the last place of float32, and Adam lets a weight whose gradient is nearly zero differ by more than that."""
    found = weights(run)
    for name, expected in alone.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(found[name], alone[name]) for name in alone), (
        "this is the draft of one process"
    )
    assert read_document(run / "last")["provenance"]["processes"] == 2


def test_the_documented_command_makes_the_draft_that_one_process_makes(
    folder: Path, alone: dict[str, torch.Tensor]
):
    """On the default device."""
    two = run(documented(folder, "two", "--steps", "6", "-v"))
    assert two.returncode == 0, two.stderr[-9000:]
    assert two.stdout.split() == ["draft:", str(folder / "two" / "best")], "said once"
    assert two.stderr.count("2 processes on cpu (gloo)") == 1
    check_same_draft(folder / "two", alone)


def free_port() -> str:
    """A port of loopback that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextlib.contextmanager
def two_machines(folder: Path, out: str, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The documented launches of two machines with a process each, on loopback."""
    port, started = free_port(), []
    for rank in ("0", "1"):
        places = {"RANK": rank, "HOST": "127.0.0.1", "PORT": port, "COUNT": "1"}
        command = documented(folder, out, *more, launch=MACHINES, **places)
        started.append(
            subprocess.Popen(
                command, env=unlaunched(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        yield started
    finally:
        for one in started:
            for process in [*psutil.Process(one.pid).children(recursive=True)] if one.poll() is None else []:
                process.kill()
            one.kill()
            one.communicate()


@pytest.mark.slow
def test_two_machines_make_the_draft_that_one_process_makes(folder: Path, alone: dict[str, torch.Tensor]):
    """Each by a launch of its own, on the default device."""
    with two_machines(folder, "machines", "--steps", "6", "-v") as launches:
        (first, heard), (second, other) = [one.communicate(timeout=300) for one in launches]
    assert [one.returncode for one in launches] == [0, 0], heard[-4000:] + other[-4000:]
    assert first.split() == ["draft:", str(folder / "machines" / "best")] and second == ""
    assert heard.count("2 processes on cpu (gloo)") == 1 and "validation loss" not in other
    check_same_draft(folder / "machines", alone)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_that_is_lost_ends_the_other_by_one_line(folder: Path, victim: int):
    """The launch of the first machine is also where all meet."""
    out = folder / f"lost-{victim}"
    with two_machines(folder, out.name, "--steps", "3000", "--save-every", "20") as launches:
        wait_for_state(out)
        victims = [launches[victim], *psutil.Process(launches[victim].pid).children(recursive=True)]
        for process in victims:
            process.send_signal(signal.SIGKILL)
        _, said = launches[1 - victim].communicate(timeout=120)
    assert launches[1 - victim].returncode != 0
    (line,) = [line for line in said.splitlines() if "lost another one" in line]
    assert line.startswith(f"vlmexport: process {1 - victim} of 2")
    check_whole(out)


def test_a_command_that_accelerate_starts_once_is_refused(folder: Path):
    start = documented(folder, "launched", "--steps", "6")
    words = start[start.index("-m", 3) :]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = run([*launch, *words])
    assert done.returncode != 0 and not (folder / "launched").exists()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("vlmexport: ")]
    assert "started one process and was asked for several" in line


@contextlib.contextmanager
def two_processes(command: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Of a command, as a launcher starts them, but nobody watches over them."""
    port, started = free_port(), []
    for rank in ("0", "1"):
        told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(
            subprocess.Popen(command, env=unlaunched() | told | place, stderr=subprocess.PIPE, text=True)
        )
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


def wait_for_state(folder: Path) -> None:
    """Until a run has saved its state."""
    end = time.monotonic() + 300
    while not (folder / "state.pt").exists():
        assert time.monotonic() < end, "no state was saved"
        time.sleep(0.05)


def check_whole(folder: Path) -> None:
    """Nothing in a run's folder is half written, and no process holds it."""
    assert sorted(path.name for path in folder.iterdir() if path.name != "tensorboard") == sorted(
        ["last", "lock", "log.jsonl", "state.pt", *(["best"] if (folder / "best").exists() else [])]
    )
    for name in ("last", "best"):
        if (folder / name).exists():
            open_draft(folder / name)
    torch.load(folder / "state.pt", weights_only=True)
    with only_one(folder / "lock"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_other_by_one_line(folder: Path, victim: int):
    out = folder / f"killed-{victim}"
    command = documented(folder, out.name, "--steps", "3000", "--save-every", "20")
    with two_processes([sys.executable, *command[command.index("-m", 3) :]]) as processes:
        wait_for_state(out)
        processes[victim].send_signal(signal.SIGKILL)
        _, said = processes[1 - victim].communicate(timeout=120)
    assert processes[1 - victim].returncode == 2
    (line,) = [line for line in said.splitlines() if "lost another one" in line]
    assert line.startswith(f"vlmexport: process {1 - victim} of 2") and "Traceback" not in said
    check_whole(out)


@pytest.mark.slow
def test_a_launch_of_which_a_process_is_killed_is_continued_by_the_same_command(folder: Path):
    out = folder / "continued"
    command = documented(folder, out.name, "--steps", "1000", "--save-every", "20", "--eval-every", "500")
    started = subprocess.Popen(command, env=unlaunched(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_state(out)
        ranks = psutil.Process(started.pid).children(recursive=True)
        next(one for one in ranks if one.environ().get("RANK") == "1").kill()
        _, said = started.communicate(timeout=120)
    finally:
        started.kill()
    assert started.returncode != 0 and not any(one.is_running() for one in ranks)
    assert len([x for x in said.splitlines() if x.startswith(("vlmexport: ", "Interrupted."))]) == 1
    check_whole(out)
    again = run(command)
    assert again.returncode == 0, again.stderr[-9000:]
    (resumed,) = re.findall(r"resumed at step (\d+)/1000", again.stderr)
    assert 20 <= int(resumed) < 1000
    judged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in judged if line["kind"] == "validation"][-1] == 1000
