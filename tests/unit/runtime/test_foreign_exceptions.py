"""Whose an exception is, whatever its class: a library's, or the program's own that a signal handler raised."""

from __future__ import annotations

import ast
import collections
import functools
import heapq
import inspect
import io
import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import vlmexport.runtime
from PIL import Image
from vlmexport.runtime.common.foreign_errors import from_signal_handler, is_foreign, raise_if_foreign


class Late(Exception):
    """As a program defines one."""


class Stop(BaseException):
    """As a program ends itself."""


def caught(code: str, begin: Callable[[], object] = lambda: None, **names: Any) -> BaseException:
    """What a function of ours catches that runs `code`; `begin` is called right before it."""
    space: dict[str, Any] = {"__name__": "vlmexport.runtime.anything", **names}
    exec(
        f"def call():\n  try:\n    {code}\n  except BaseException as error:\n    return error",
        space,
    )
    begin()
    error = space["call"]()
    assert isinstance(error, BaseException)
    return error


def damaged_png() -> io.BytesIO:
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "PNG")
    return io.BytesIO(file.getvalue()[:50])


LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "C code": ("int('x')", {}),
    "the standard library": ("json.loads('{')", {"json": json}),
    "Pillow": ("Image.open(file).load()", {"Image": Image, "file": damaged_png()}),
    "PyAV, whose frames have no module": (
        "av.open(path)",
        {"av": pytest.importorskip("av"), "path": __file__},
    ),
    "a template": (
        "t.render()",
        {"t": jinja2.Template("{% macro m() %}{{ 1 // 0 }}{% endmacro %}{{ m() }}")},
    ),
    "our own": ("raise_if_foreign(ValueError('x')); int('x')", {"raise_if_foreign": raise_if_foreign}),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_exception_of_a_library_is_not_foreign(name: str) -> None:
    code, names = LIBRARIES[name]
    error = caught(code, **names)
    assert not is_foreign(error)
    raise_if_foreign(error)


WAITS: dict[str, tuple[str, dict[str, Any]]] = {
    "C code": ("sum(range(2 * 10**7))", {}),
    "the standard library": (
        "deque(merge(count(), count()), maxlen=0)",
        {"deque": collections.deque, "merge": heapq.merge, "count": itertools.count},
    ),
    "a template": ("t.render()", {"t": jinja2.Template("{% for i in range(10**8) %}{{ i }}{% endfor %}")}),
    "our own": ("for _ in count(): len('')", {"count": itertools.count}),
}


@pytest.mark.parametrize("kind", [Late, RuntimeError, ValueError, TimeoutError, KeyError, Stop])
@pytest.mark.parametrize("name", WAITS)
def test_what_a_signal_handler_raises_is_foreign(name: str, kind: type[BaseException]) -> None:
    def handler(*_: object) -> None:
        raise kind("late")

    code, names = WAITS[name]
    before = signal.signal(signal.SIGALRM, handler)
    try:  # compiling may take longer than the timer on a busy machine
        error = caught(code, lambda: signal.setitimer(signal.ITIMER_REAL, 0.05), **names)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert type(error) is kind and is_foreign(error)
    with pytest.raises(kind):
        raise_if_foreign(error)


def test_translated_foreign_exception_is_foreign() -> None:
    def given() -> None:
        raise Late("x")

    space: dict[str, Any] = {"__name__": "PIL.anything"}
    exec(
        "def library(call):\n  try: call()\n  except Exception as error: raise OSError('damaged') from error",
        space,
    )
    assert is_foreign(caught("library(given)", library=space["library"], given=given))
    assert not is_foreign(caught("library(int.__new__)", library=space["library"]))


def test_exception_of_a_dependency_is_not_foreign(tmp_path: Path) -> None:
    """Nobody can list it; a signal handler of a program that is installed beside them is still the program's."""
    place = tmp_path / "site-packages" / "nobody_knows.py"
    place.parent.mkdir()
    place.write_text("def call(*_):\n    raise OSError('no network')\n")
    space: dict[str, Any] = {"__name__": "nobody_knows"}
    exec(compile(place.read_text(), str(place), "exec"), space)
    assert not is_foreign(caught("other()", other=space["call"]))
    before = signal.signal(signal.SIGUSR1, space["call"])
    try:
        assert is_foreign(caught("other()", other=space["call"]))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_earlier_handled_exception_does_not_count() -> None:
    try:
        raise Late("an earlier one")
    except Late:
        assert not is_foreign(caught("int('x')"))


class Handler:
    def __call__(self, *_: object) -> None:
        raise Late("called")

    def method(self, *_: object) -> None:
        raise Late("of a method")


def _with_more(_more: int, *_: object) -> None:
    Handler().method()


@pytest.mark.parametrize(
    "handler", [Handler(), Handler().method, functools.partial(_with_more, 1), lambda *_: Handler()()]
)
def test_a_signal_handler_is_told_from_other_code_of_the_caller(handler: Any) -> None:
    def read() -> None:
        signal.raise_signal(signal.SIGALRM)

    def broken() -> None:
        raise Late("of a stream")

    assert not from_signal_handler(caught("broken()", broken=broken))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        assert from_signal_handler(caught("read()", read=read))
        assert not from_signal_handler(caught("broken()", broken=broken))
    finally:
        signal.signal(signal.SIGALRM, before)


ANY = {
    "OSError", "ValueError", "TypeError", "RuntimeError", "AttributeError", "KeyError", "LookupError", "ArithmeticError",
    "Exception", "BaseException",
}  # fmt: skip
"""Classes of which a program's signal handler may well raise one."""
ASKING = {"raise_if_foreign", "is_foreign", "from_signal_handler", "_of_library", "_raise"}


def handlers() -> list[Any]:
    """Every `except` of the runtime that catches such a class and does not end by raising it again; but for commands, whose
    process is ours."""
    found = []
    for path in sorted(Path(inspect.getfile(vlmexport.runtime)).parent.rglob("*.py")):
        if path.parent.name == "commands" or path.name == "cli.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ExceptHandler) or node.type is None:
                continue
            kinds = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            if path.name == "session.py" and kinds == {
                "KeyError"
            }:  # no handler runs there: nothing is called
                continue
            again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if kinds & ANY and not again:
                found.append(pytest.param(node, id=f"{path.name}:{node.lineno}"))
    return found


@pytest.mark.parametrize("handler", handlers())
def test_every_handler_checks_for_foreign_exceptions(handler: ast.ExceptHandler) -> None:
    called = {name.id for name in ast.walk(handler) if isinstance(name, ast.Name)}
    assert called & ASKING
