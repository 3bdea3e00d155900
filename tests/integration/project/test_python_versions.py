"""What the metadata says about Python versions is true: 3.11 and newer for everything, 3.10 for the runtime's own code."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
PINNED = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "tokenizers")


def required(python: str) -> set[str]:
    """Names of the packages that the runtime needs on a version of Python."""
    found = [Requirement(text) for text in PROJECT["dependencies"]]
    return {r.name for r in found if r.marker is None or r.marker.evaluate({"python_version": python})}


def test_the_runtime_installs_on_3_10_without_onnx_runtime() -> None:
    assert "3.10" in SpecifierSet(PROJECT["requires-python"])
    assert "3.9" not in SpecifierSet(PROJECT["requires-python"])
    assert required("3.11") - required("3.10") == {"onnxruntime"}


def test_the_markers_say_what_the_packages_say() -> None:
    """Where ONNX Runtime gets wheels for 3.10, or transformers loses 3.11, the metadata has to change."""
    for name in ("onnxruntime", "transformers"):
        own = SpecifierSet(importlib.metadata.metadata(name)["Requires-Python"])
        assert "3.10" not in own and "3.11" in own, name


def test_the_export_extra_cannot_be_installed_on_3_10() -> None:
    """Without a marker, so that pip refuses: the oldest transformers that it allows needs 3.11."""
    extra = [Requirement(text) for text in PROJECT["optional-dependencies"]["export"]]
    assert all(requirement.marker is None for requirement in extra)
    transformers = next(requirement for requirement in extra if requirement.name == "transformers")
    assert transformers.specifier == SpecifierSet(">=5.23")  # Requires-Python >= 3.11 since 5.21


def test_linter_and_type_checker_are_at_the_runtimes_version() -> None:
    assert SETTINGS["tool"]["ruff"]["target-version"] == "py310"
    assert SETTINGS["tool"]["pyright"]["pythonVersion"] == "3.10"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "runtime").rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_the_runtime_parses_as_3_10(file: Path) -> None:
    ast.parse(file.read_text(), feature_version=(3, 10))


def test_the_parser_refuses_newer_syntax() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* ValueError:\n    pass\n", feature_version=(3, 10))


def test_the_workflow_runs_the_oldest_and_the_newest_python() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tested = re.search(r'python: \["([\d.]+)", "([\d.]+)"\]', workflow)
    assert tested is not None

    def supported(name: str) -> set[int]:
        own = importlib.metadata.metadata(name)
        classified = re.findall(r"Python :: 3\.(\d+)", " ".join(own.get_all("Classifier") or []))
        return {int(minor) for minor in classified}

    common = set.intersection(*(found for found in map(supported, PINNED) if found))
    assert list(tested.groups()) == [f"3.{min(common)}", f"3.{max(common)}"]
    for script in re.findall(r"run: (\.\S+)", workflow):
        assert os.access(ROOT / script, os.X_OK), script


def test_the_readme_says_the_same() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "Python ≥ 3.11" in readme and "Python 3.10 (JetPack 6)" in readme


ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnxruntime", "transformers", "onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_tests_of_the_runtime_are_found_without_torch_and_onnx_runtime(tmp_path: Path) -> None:
    """As on Python 3.10 (`.ci/runtime`): what needs one of them is skipped and says so, file by file."""
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    asked = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "tests/unit/runtime",
    ]
    found = subprocess.run(
        asked, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert "SKIPPED" in found.stdout, "nothing was missing"
