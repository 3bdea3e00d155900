"""Actors of an existing Ray cluster, which share waves of requests as processes of one machine do (the extra `[ray]`)."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from .errors import OptionError, VlmexportError
from .foreign_errors import raise_if_foreign
from .optional_deps import need_extra

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds without an answer after which a line says what may be the reason."""

CONNECT = 10.0
"""Seconds that a cluster has to take a connection."""

Key = TypeVar("Key", bound=Hashable)


class Wave(NamedTuple, Generic[Key]):
    """What one actor answers at a time: what the caller knows it by, what is asked, and the files that this reads."""

    key: Key
    asked: Any
    files: Sequence[str] = ()


@dataclass(frozen=True)
class _Failure:
    error: Exception


class Actors:
    """Actors that are started when there are waves, and ended with each call of `answers`. They work in this process's folder,
    which all nodes share, as they do the bundle and the files of waves.

    Args:
        address: of the cluster, as `ray.init` takes it: "auto", "HOST:PORT", "ray://HOST:PORT".
        make: gives, in an actor, the function that answers what a wave asks; it can be pickled.
        whole_nodes: one actor for each node, with its cores; else one for each core of the cluster.

    Raises:
        OptionError: Ray is not installed, or no cluster answers at `address`.
    """

    def __init__(self, address: str, make: Callable[[], Callable[[Any], Any]], whole_nodes: bool) -> None:
        need_extra("ray", "--ray")
        self._ray: Any = import_module("ray")
        self._make, self._begun = make, not self._ray.is_initialized()
        try:
            _knock(address)
            self._ray.init(address, ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            raise_if_foreign(error)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise OptionError(
                f"--ray {address:.80}: no cluster answers there ({reason:.200}); give auto, HOST:PORT or ray://HOST:PORT"
            ) from error
        nodes = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        nodes = [count for count in nodes if count] or [1]
        self.count = len(nodes) if whole_nodes else sum(nodes)
        """Actors at most."""
        self._cores = min(nodes) if whole_nodes else 1

    def answers(self, waves: Iterable[Wave[Key]]) -> Generator[tuple[Key, Any], None, None]:
        """(key, what the function returned) of every wave, as soon as it is there. A wave is taken when an actor is free.

        Raises what the function raised; OptionError where a node does not see a file that is here; VlmexportError where an
        actor or the cluster is lost.
        """
        actors: list[Any] = []
        running: dict[Any, tuple[Any, Wave[Key]]] = {}
        left, patient = iter(waves), True

        def hand_out(actor: Any = None) -> bool:
            if (wave := next(left, None)) is None:
                return False
            if actor is None:
                actor = self._actor()
                actors.append(actor)
            there = [name for name in wave.files if os.path.exists(name)]  # noqa: PTH110
            running[actor.answer.remote(wave.asked, there)] = actor, wave
            return True

        errors = self._ray.exceptions
        try:
            while len(actors) < self.count and hand_out():
                pass
            while running:
                done, _ = self._ray.wait(list(running), timeout=PATIENCE if patient else None)
                if not done:
                    patient = False
                    log.warning("no actor has answered yet; the cluster may have no free cores")
                for each in done:
                    patient = False
                    actor, wave = running.pop(each)
                    answer = self._ray.get(each)
                    if isinstance(answer, _Failure):
                        raise answer.error
                    hand_out(actor)
                    yield wave.key, answer
        except errors.RayError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise VlmexportError(
                f"an actor of the Ray cluster was lost ({reason:.200}); the same command goes on from what was saved"
            ) from error
        finally:
            for actor in actors:
                with contextlib.suppress(errors.RayError):
                    self._ray.kill(actor)

    def close(self) -> None:
        """Leave the cluster, unless this process had joined it before."""
        if self._begun:
            self._ray.shutdown()

    def _actor(self) -> Any:
        kind = self._ray.remote(num_cpus=self._cores, scheduling_strategy="SPREAD")(_Actor)
        return kind.remote(self._make, os.getcwd())  # noqa: PTH109


def _knock(address: str) -> None:
    """Raises OSError or ValueError where nothing listens at HOST:PORT: Ray itself would wait for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()


class _Actor:
    """What runs on a node. Errors are returned: Ray would wrap what is raised in pages of text."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], folder: str) -> None:
        self._make, self._folder = make, folder
        self._function: Callable[[Any], Any] | None = None

    def answer(self, asked: Any, files: Sequence[str]) -> Any:
        """What the function returns, or a `_Failure`. `files` are on the disk of whoever asks."""
        try:
            if self._function is None:
                self._check_seen([self._folder])
                os.chdir(self._folder)
                self._function = self._make()
            self._check_seen(files)
            return self._function(asked)
        except Exception as error:
            raise_if_foreign(error)
            return _Failure(_sendable(error))

    def _check_seen(self, files: Sequence[str]) -> None:
        for name in files:
            if not Path(name).exists():
                raise OptionError(
                    f"the node {platform.node()} does not see {name}, which is here: --ray needs folders that all nodes share"
                )


def _sendable(error: Exception) -> Exception:
    """An error that may not survive the way to whoever asks becomes a RuntimeError of its text; ours do."""
    if isinstance(error, VlmexportError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
