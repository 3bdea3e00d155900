"""What pyproject.toml promises is what the tree holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("exporter", "runtime", "calibration")


def test_src_is_laid_out_as_it_is_installed():
    package = ROOT / "src" / "vlmexport"
    assert {path.name: str(path.readlink()) for path in package.iterdir() if path.is_symlink()} == {
        room: f"../../{room}" for room in ROOMS
    }


def test_every_python_file_is_in_a_package():
    """Packages are found by their __init__.py: a file beside none would not be installed."""
    lost = [
        str(file.relative_to(ROOT))
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    ]
    assert lost == []


def test_both_distributions_are_of_one_version():
    ours, models = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "models")
    )
    same = ("version", "license", "authors", "requires-python")
    assert [models[name] for name in same] == [ours[name] for name in same]
    assert (ROOT / "models" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_nothing_that_is_installed_imports_what_is_not():
    files = [file for room in (*ROOMS, "src") for file in (ROOT / room).rglob("*.py")]
    wrong = [
        str(file.relative_to(ROOT))
        for file in files
        if re.search(
            r"^\s*(?:from|import) (?:recipes|tests|benchmarks|examples)\b", file.read_text("utf-8"), re.M
        )
    ]
    assert files and wrong == []


def test_linters_read_every_file_once():
    """The rooms are read as themselves, and not by the links in src/ again."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    read = [path for pattern in settings["include"] for path in ROOT.glob(pattern)]
    assert not [
        path for path in read if path.is_symlink() or any((path / room).is_symlink() for room in ROOMS)
    ]
    assert {*ROOMS, "__init__.py", "__main__.py", "optimum"} <= {path.name for path in read}


def test_bundled_models_are_small():
    files = [f for f in (ROOT / "models" / "vlmexport_tiny_models").rglob("*") if f.is_file()]
    assert len(files) > 40
    assert sum(f.stat().st_size for f in files) <= 36e6
