"""Examples and benchmark scripts are programs: they parse, and they only import what exists."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_project_imports_exist(program):
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vlmexport"):
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_programs_explain_themselves(program):
    assert ast.get_docstring(ast.parse(program.read_text()))


def test_demo_has_help():
    out = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--scene" in out.stdout
