"""A bundle behind a real Triton Inference Server: the same text, cancelled in time, refused in one line, in two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="building the bundle needs [export]")

from vlmexport.runtime.serving.triton.repository import write_repository
from vlmexport.runtime.session.session import Session

from tests.integration.triton.server import WAIT, Server, packages
from tests.support.programs import program

pytestmark = pytest.mark.slow

GATED = """
import time
from pathlib import Path

import triton_python_backend_utils
from vlmexport.runtime.serving.ticket import Ticket
from vlmexport.runtime.serving.triton.model import TritonModel
from vlmexport.runtime.speculative.cycle import Cycle

EVENTS, PERMITS = Path({events!r}), Path({permits!r})
run, cancel, finish, begun = Cycle.run, Ticket.cancel, Ticket.finish, []


def note(event):
    with EVENTS.open("a") as file:
        file.write(event + "\\n")


def gated(cycle):
    begun.append(cycle)
    note("cycle")
    while len(begun) > int(PERMITS.read_text()):
        time.sleep(0.005)
    return run(cycle)


def noted_cancel(ticket):
    cancel(ticket)
    note("cancel")


def noted_finish(ticket, outcome):
    note(outcome.finish_reason)
    finish(ticket, outcome)


Cycle.run, Ticket.cancel, Ticket.finish = gated, noted_cancel, noted_finish


class TritonPythonModel(TritonModel):
    def __init__(self):
        super().__init__(triton_python_backend_utils)
"""
"""A 1/model.py that notes what happens, and whose cycles wait for permits."""


class Gate:
    """What the gated model notes, and how many cycles it may run."""

    def __init__(self, folder: Path):
        self._events, self._permits = folder / "events", folder / "permits"
        self._events.touch()
        self.allow(0)
        self.model = GATED.format(events=str(self._events), permits=str(self._permits))

    def allow(self, cycles: int) -> None:
        scratch = self._permits.with_suffix(".new")
        scratch.write_text(str(cycles))
        scratch.replace(self._permits)

    def events(self) -> list[str]:
        return self._events.read_text().split()

    def wait(self, event: str, count: int = 1) -> None:
        """Until it was noted so many times."""
        end = time.monotonic() + WAIT
        while self.events().count(event) < count:
            assert time.monotonic() < end, self.events()
            time.sleep(0.01)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages()  # or skip, before anything is built
    folder = tmp_path_factory.mktemp("built") / "scenes"
    command = program(
        "vlmexport", "build", "--model", "tiny-blip2-flant5", "--max-batch", "16", "-o", folder, "-q"
    )
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def server(bundle: Path, gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    write_repository(bundle, models, threads=1)
    write_repository(bundle, models, "narrow", max_batch=1, max_waiting=0, threads=1)
    gated = write_repository(bundle, models, "gated", max_batch=1, max_waiting=1, threads=1)
    (gated / "1" / "model.py").write_text(gate.model)
    server = Server(models, tmp_path_factory.mktemp("server"))
    try:
        yield server
        assert server.stop() == 0, "it ends on SIGTERM, all models unloaded"
    finally:
        server.kill()


@pytest.fixture(scope="module")
def picture(bundle: Path) -> bytes:
    return (bundle / "example.png").read_bytes()


@pytest.fixture(scope="module")
def generate(bundle: Path) -> Iterator[Callable[..., Any]]:
    with Session.load(bundle, threads=1) as session:
        yield session.generate


REQUESTS: list[dict[str, Any]] = [
    {"prompt": "describe the scene"},
    {},
    {"prompt": "describe the scene", "temperature": 0.7, "seed": 2**63 + 5},
    {"prompt": "describe the scene", "max_new_tokens": 7},
    {"prompt": "describe the scene", "stop": [","], "draft": "prompt-lookup"},
    {"prompt": "describe the scene", "temperature": 1.1, "seed": 3, "top_k": 4, "speculative": False},
]
INPUTS = {"prompt", "max_new_tokens", "temperature", "seed"}
"""What has an input of its own; the others go into `options`."""


def inputs(request: dict[str, Any]) -> dict[str, Any]:
    """A request of `Session.generate` as inputs of the model."""
    own = {name: value for name, value in request.items() if name in INPUTS}
    rest = {name: value for name, value in request.items() if name not in INPUTS}
    return own | ({"options": json.dumps(rest)} if rest else {})


def test_text_is_that_of_generate(server: Server, picture: bytes, generate: Callable[..., Any]) -> None:
    asked = [
        (server.ask("scenes", image=picture, stream=stream, **inputs(request)), stream, request)
        for request in REQUESTS
        for stream in (True, False)
    ]
    for number, stream, request in asked:
        want = generate(picture, **request)
        assert server.text(number) == want.text
        *pieces, last = server.wait(number)
        assert (last["finish_reason"], last["tokens"]) == (want.finish_reason, len(want.tokens))
        assert stream or not pieces
        assert all(line["text"] and (line["finish_reason"], line["tokens"]) == ("", 0) for line in pieces)
    one = server.ask("scenes", image=picture, stream=True, prompt="describe the scene")
    responses = server.wait(one)
    assert len(responses) > 5 and responses[-1]["accepted"] > 20


def test_what_cannot_be_served_is_refused_in_one_line(server: Server, picture: bytes) -> None:
    status = {"triton_grpc_error": "true"}
    unreadable = server.ask("scenes", status, image=b"no picture")
    option = server.ask("scenes", status, image=picture, max_new_tokens=0)
    silent = server.ask("scenes", image=b"no picture")
    (refused,), (other,), (plain,) = map(server.wait, (unreadable, option, silent))
    assert refused["status"] == other["status"] == "StatusCode.INVALID_ARGUMENT"
    assert (
        refused["error"].startswith("the image: not an image of a known format")
        and "\n" not in refused["error"]
    )
    assert other["error"] == "max_new_tokens: 0 is not an integer ≥ 1"
    assert plain == {"error": refused["error"], "status": None}, "by default Triton sends no status"


def test_a_full_queue_and_a_hung_up_client(
    server: Server, gate: Gate, picture: bytes, generate: Callable[..., Any]
) -> None:
    """A cycle runs while the client hangs up: it is the request's last one."""
    gate.allow(4)
    running = server.ask("gated", image=picture, prompt="describe the scene", stream=True)
    gate.wait("cycle", 5)
    assert server.wait(running, 1)[0]["text"]
    waiting = server.ask("gated", image=picture, prompt="describe the scene")
    refused = server.ask("gated", {"triton_grpc_error": "true"}, image=picture)
    (error,) = server.wait(refused)
    assert error["status"] == "StatusCode.UNAVAILABLE" and error["error"].startswith(
        "1 requests wait already; ask"
    )
    server.cancel(running)
    gate.wait("cancel")
    gate.allow(10**6)
    assert server.text(waiting) == generate(picture, "describe the scene").text
    events = gate.events()
    assert events[events.index("cancel") :][:2] == ["cancel", "cancelled"]
    assert events[: events.index("cancel")] == ["cycle"] * 5 and events[-1] == "eos"


def test_two_instances_share_nothing(
    bundle: Path, picture: bytes, generate: Callable[..., Any], tmp_path: Path
) -> None:
    """Each is a process with a session of its own; one may die."""
    write_repository(bundle, tmp_path / "models", "pair", max_batch=2, threads=1, instances=2)
    (tmp_path / "server").mkdir()
    server = Server(tmp_path / "models", tmp_path / "server")
    try:
        first, second = server.instances("pair")
        for instance in (first, second):
            assert "weights.bin" in Path(f"/proc/{instance}/maps").read_text(), "each has loaded the bundle"
        want = {seed: generate(picture, temperature=1.0, seed=seed).text for seed in range(12)}
        asked = {
            seed: server.ask("pair", image=picture, temperature=1.0, seed=seed, stream=True) for seed in want
        }
        assert {seed: server.text(number) for seed, number in asked.items()} == want
        assert len({*want.values()}) > 6
        os.kill(first, signal.SIGKILL)
        told = [
            server.wait(server.ask("pair", image=picture, temperature=1.0, seed=seed))[-1] for seed in want
        ]
        served = {seed: line["text"] for seed, line in enumerate(told) if "error" not in line}
        assert served and served == {seed: want[seed] for seed in served}
        lost = {line["error"] for line in told if "error" in line}
        assert lost <= {"Stub process 'pair_0_0' is not healthy."}
        assert server.instances("pair")[-1] == second
    finally:
        server.kill()  # this release of Triton waits in vain for an instance that has died
