"""Waves over actors, on a stand-in for Ray that runs them in this process (`tests/unit/calibration/test_ray.py` has the real one)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vlmexport.runtime.common import optional_deps, ray_actors
from vlmexport.runtime.common.errors import ImageError, OptionError, VlmexportError
from vlmexport.runtime.common.ray_actors import Actors, Wave


class RayError(Exception):
    """As Ray has it."""


class Cluster:
    """As much of the module `ray` as is used. Answers come last asked first; the actors in `lost` end instead."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, cores: tuple[int, ...]) -> None:
        self.cores, self.lost = cores, set[int]()
        self.started: list[dict[str, Any]] = []
        self.joined: list[str] = []
        self.left, self.most, self.ended = 0, 0, 0
        self.waiting: dict[int, tuple[int, Callable[[], Any]]] = {}

    def is_initialized(self) -> bool:
        return len(self.joined) > self.left

    def init(self, address: str, **_: Any) -> None:
        if address == "auto":
            raise ConnectionError("Could not find any running Ray instance.\nmore")
        self.joined.append(address)

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 64}}
        return [{"Alive": True, "Resources": {"CPU": float(n)} if n else {}} for n in self.cores] + [dead]

    def remote(self, **asked: Any) -> Callable[[type], Any]:
        def made(kind: type) -> Any:
            def begin(*given: Any) -> Any:
                self.started.append(asked)
                number, actor = len(self.started), kind(*given)
                return SimpleNamespace(answer=SimpleNamespace(remote=lambda *a: self._ask(number, actor, a)))

            return SimpleNamespace(remote=begin)

        return made

    def _ask(self, number: int, actor: Any, given: tuple[Any, ...]) -> int:
        reference = 1000 * number + len(given[0])
        self.waiting[reference] = number, lambda: actor.answer(*given)
        self.most = max(self.most, len(self.waiting))
        return reference

    def wait(self, references: list[int], timeout: float | None) -> tuple[list[int], list[int]]:
        return references[-1:], references[:-1]

    def get(self, reference: int) -> Any:
        number, answer = self.waiting.pop(reference)
        if number in self.lost:
            raise RayError("The actor died.\nmore")
        return answer()

    def kill(self, actor: Any) -> None:
        self.ended += 1

    def shutdown(self) -> None:
        self.left += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster((2, 0, 4))
    monkeypatch.setattr(ray_actors, "import_module", lambda name: made)
    monkeypatch.setitem(optional_deps.MODULES, "ray", ())
    # Frames of this file are no library's: what the stand-in raises would count as the program's own.
    monkeypatch.setattr(ray_actors, "raise_if_foreign", lambda error: None)
    return made


@pytest.fixture
def address() -> Iterator[str]:
    """Where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def doubling() -> Callable[[str], str]:
    return lambda asked: asked * 2


def waves(count: int) -> Iterator[Wave[int]]:
    return (Wave(n, "x" * (n + 1)) for n in range(count))


def test_every_wave_is_answered_by_an_actor(cluster: Cluster, address: str):
    actors = Actors(address, doubling, whole_nodes=False)
    assert dict(actors.answers(waves(20))) == {n: "x" * (2 * n + 2) for n in range(20)}
    assert len(cluster.started) == cluster.ended == cluster.most == actors.count == 6, (
        "the cores of the nodes that live"
    )
    assert {each["num_cpus"] for each in cluster.started} == {1}
    assert dict(actors.answers(waves(2))) == {0: "xx", 1: "xxxx"}
    assert len(cluster.started) == 8, "no more actors than waves"
    actors.close()
    assert cluster.joined == [address] and cluster.left == 1


def test_a_large_model_has_an_actor_on_each_node(cluster: Cluster, address: str):
    actors = Actors(f"ray://{address}", doubling, whole_nodes=True)
    assert len(dict(actors.answers(waves(5)))) == 5
    assert [each["num_cpus"] for each in cluster.started] == [2, 2]


def test_a_cluster_that_the_program_had_joined_is_not_left(cluster: Cluster, address: str):
    cluster.init(address)
    Actors(address, doubling, whole_nodes=False).close()
    assert cluster.left == 0


def test_errors_of_actors_are_raised_as_they_are(cluster: Cluster, address: str):
    def failing() -> Callable[[str], str]:
        raise ImageError("no picture")

    with pytest.raises(ImageError, match=r"^no picture$"):
        list(Actors(address, failing, whole_nodes=False).answers(waves(3)))
    assert cluster.ended == len(cluster.started) == 3

    class Local(Exception):
        """One that another process does not know."""

    def strange() -> Callable[[str], str]:
        raise Local("odd")

    with pytest.raises(RuntimeError, match=r"^Local: odd$"):
        list(Actors(address, strange, whole_nodes=False).answers(waves(1)))


def test_a_lost_actor_is_one_line(cluster: Cluster, address: str):
    cluster.lost = {2}
    with pytest.raises(
        VlmexportError, match=r"an actor .* was lost \(The actor died\.\); the same command goes on"
    ) as caught:
        list(Actors(address, doubling, whole_nodes=False).answers(waves(4)))
    assert "\n" not in str(caught.value) and cluster.ended == 4


def test_files_that_a_node_does_not_see_are_refused(
    cluster: Cluster, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not those that nobody sees: they are bad pictures."""
    there, gone = tmp_path / "there.png", tmp_path / "gone.png"
    there.touch()
    actors = Actors(address, doubling, whole_nodes=False)
    assert list(actors.answers([Wave(1, "x", [str(there), str(gone)])])) == [(1, "xx")]
    seen = actors.answers([Wave(1, "x", [str(there)])])
    monkeypatch.setattr(cluster, "wait", lambda references, timeout: (there.unlink(), (references, []))[1])
    with pytest.raises(
        OptionError, match=rf"does not see {there}, which is here: --ray needs folders that all"
    ):
        list(seen)


def test_actors_work_in_the_folder_of_the_command(
    cluster: Cluster, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    actors = Actors(address, lambda: lambda asked: os.getcwd(), whole_nodes=False)  # noqa: PTH109
    found = actors.answers(waves(1))
    monkeypatch.setattr(cluster, "wait", lambda references, timeout: (os.chdir("/"), (references, []))[1])
    assert list(found) == [(0, str(tmp_path))]


def test_no_cluster_is_one_line(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for asked, said in (
        ("auto", "Could not find any"),
        (f"127.0.0.1:{port}", "refused"),
        ("host:x", "invalid literal"),
    ):
        with pytest.raises(OptionError, match=f"--ray {asked}: no cluster answers there .*{said}") as caught:
            Actors(asked, doubling, whole_nodes=False)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(optional_deps.MODULES, "ray", ("no_such_module",))
    with pytest.raises(OptionError, match=r"--ray needs the extra \[ray\]"):
        Actors("auto", doubling, whole_nodes=False)
