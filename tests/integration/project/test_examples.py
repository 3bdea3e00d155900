"""Examples and benchmark scripts are programs: they import what exists, and say how they are used and what is wrong.

`test_readme.py` runs the examples for real.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import python_share

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = sorted(
    path
    for room in ("examples", "benchmarks")
    for path in (ROOT / room).glob("*.py")
    if path.stem != "__init__"
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_project_imports_exist(program):
    for node in ast.walk(ast.parse(program.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith(("vlmexport", "recipes"))
        ):
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_programs_explain_themselves(program):
    assert ast.get_docstring(ast.parse(program.read_text()))


def test_python_share_benchmark_finds_its_functions():
    assert all(callable(vars(owner)[name]) for owner, name, _ in python_share.places())


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_newest_frame_takes_the_place_of_older_ones():
    place = ROOT / "examples" / "newest_frame.py"
    found = importlib.util.spec_from_file_location("newest_frame", place)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    newest, taken = module.NewestFrame(), []
    for frame in "abc":
        newest.put(frame)
    assert newest.take() == (2, "c")
    waiting = threading.Thread(target=lambda: taken.append(newest.take()))
    waiting.start()
    newest.put("d")
    waiting.join(60)
    assert taken == [(3, "d")], "a frame is given once; then the next is waited for"
    newest.put("e")
    newest.end(OSError("unplugged"))
    assert newest.take() == (4, "e")
    with pytest.raises(OSError, match="unplugged"):
        newest.take()


@pytest.mark.parametrize("name", ["control_loop.py", "newest_frame.py", "stream.py", "watch.py"])
def test_no_arguments_is_usage(name):
    done = run(name)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"usage: {name} ") and "Traceback" not in done.stderr


def test_ros_node_without_ros_names_its_requirements():
    done = run("ros2_node.py")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "usage: python examples/ros2_node.py --ros-args -p bundle:=/path/to/bundle",
        "rclpy is missing: source ROS 2's setup file first",
    ]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("control_loop.py", ["nowhere", "no.png"]),
        ("stream.py", ["nowhere", "no.png"]),
        ("newest_frame.py", ["nowhere", "0"]),
        ("watch.py", ["nowhere"]),
        ("demo.py", ["--output", "README.md"]),
    ],
)
def test_wrong_paths_are_one_line(name, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("a file")
    done = run(name, *arguments)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert arguments[-1] in done.stderr or arguments[0] in done.stderr


def test_the_demo_names_the_scenes_it_has():
    done = run("demo.py", "--scene", "-1")
    assert done.returncode == 2 and "--scene -1: there are the scenes 0 to " in done.stderr


def test_demo_has_help():
    done = run("demo.py", "--help")
    assert done.returncode == 0 and "--scene" in done.stdout
