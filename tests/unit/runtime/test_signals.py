"""What a program's signal handler raises leaves a request as it is, wherever it comes, and the session serves the next one."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vlmexport.runtime import Session
from vlmexport.runtime.images.synthetic import synthetic_image

POINTS = 12
"""Moments of each kind of request."""


class Late(Exception):
    """As a program defines one."""


class Stop(BaseException):
    """As a program ends itself."""


class Alarm:
    """Raises an exception of `kind` when it rings; remembers it."""

    def __init__(self) -> None:
        self.kind: type[BaseException] = Late
        self.raised: BaseException | None = None

    def __call__(self, *_: object) -> None:
        self.raised = self.kind("late")
        raise self.raised


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """Python drops what is raised in a callback of its garbage collector (hypothesis registers one): none runs meanwhile."""
    found = Alarm()
    before = signal.signal(signal.SIGALRM, found)
    gc.disable()
    yield found
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _whole(session: Session, asked: dict[str, Any]) -> list[list[int]]:
    return [session.generate(**asked).tokens]


def _streamed(session: Session, asked: dict[str, Any]) -> list[list[int]]:
    stream = session.stream(**asked)
    for _ in stream:
        pass
    return [stream.result.tokens]


def _many(session: Session, asked: dict[str, Any]) -> list[list[int]]:
    found = dict(session.generate_many([asked, asked | {"max_new_tokens": 5}]))
    return [getattr(found[number], "tokens", None) or [] for number in range(2)]


@pytest.mark.parametrize("draft", ["none", "eagle"])
@pytest.mark.parametrize("call", [_whole, _streamed, _many])
def test_signal_exception_leaves_the_session_usable(
    tiny_bundle: Callable[[str], Any], alarm: Alarm, call: Callable[..., list[list[int]]], draft: str
) -> None:
    with Session.load(tiny_bundle("vit-gpt2").path, max_batch=2) as session:
        asked = {"image": synthetic_image(32, 32), "draft": draft, "max_new_tokens": 12, "ignore_eos": True}
        right = call(session, asked)
        begin = time.perf_counter()
        assert call(session, asked) == right
        taken, rang = time.perf_counter() - begin, 0
        for point in range(POINTS):
            alarm.kind = (Late, RuntimeError, ValueError, TimeoutError, Stop)[point % 5]
            alarm.raised, caught = None, None
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + taken * point / POINTS)
                call(session, asked)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except BaseException as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                caught = error
            assert caught is alarm.raised
            if caught is not None:
                rang += 1
                caught.__traceback__ = None  # it holds the stream, if it came between two pieces
            assert call(session, asked) == right
        assert rang
