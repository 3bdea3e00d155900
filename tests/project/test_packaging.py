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

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("exporter", "runtime", "calibration")


def test_every_package_is_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"optimum.commands.register", "vlmexport"} | {
        "vlmexport." + ".".join(folder.relative_to(ROOT).parts)
        for room in ROOMS
        for folder in [ROOT / room, *(ROOT / room).rglob("*")]
        if folder.is_dir() and (folder / "__init__.py").exists()
    }
    assert listed == found


def test_every_python_file_is_in_a_package():
    lost = [
        str(file.relative_to(ROOT))
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    ]
    # Of a namespace package (PEP 420) of optimum's.
    assert lost == ["exporter/optimum_cli/register_vlmexport.py"]


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name
)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_bundled_models_are_small():
    files = [f for f in (ROOT / "exporter" / "bundled").rglob("*") if f.is_file()]
    assert files, "exporter/bundled is empty"
    assert sum(f.stat().st_size for f in files) <= 36e6
