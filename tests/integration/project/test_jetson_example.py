"""`examples/jetson`: the workstation's script as it is, the device's on an emulated Jetson."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from vlmexport.runtime.images.synthetic import synthetic_image

from tests.support.fake_trtexec import fake_trtexec
from tests.support.programs import environment

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "jetson"
EMULATOR = "tests.support.emulated_jetson"


def program(path: Path, *command: str | Path) -> None:
    """An executable that hands its arguments on to `command`."""
    path.write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in command) + ' "$@"\n')
    path.chmod(0o755)


def script(name: str, *arguments: str | Path, programs: Path, cwd: Path) -> str:
    """What a script printed; it must end well."""
    variables = environment() | {"PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "200"}
    done = subprocess.run(
        [EXAMPLE / name, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "differ" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the workstation's script makes."""
    folder = tmp_path_factory.mktemp("workstation")
    programs = folder / "bin"
    programs.mkdir()
    program(programs / "vlmexport", sys.executable, "-m", "vlmexport")
    said = script("workstation.sh", "tiny-vit-gpt2", folder / "out", programs=programs, cwd=folder)
    assert "Jetson Orin Nano" in said and "bring it to the device" in said
    return folder / "out" / "bundle.tar.gz"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "lowering"),
    [("10.3.0.30", "portable"), ("10.16.1.11", "native")],
    ids=["JetPack 6.2", "JetPack 7.2"],
)
def test_from_an_archive_to_a_captioning_loop(
    archive: Path, tmp_path: Path, version: str, lowering: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs / "vlmexport", sys.executable, "-m", EMULATOR, version, "vlmexport")
    program(programs / "python3", sys.executable, "-m", EMULATOR, version)
    Image.fromarray(synthetic_image(96, 128)).save(tmp_path / "picture.png")
    said = script("device.sh", archive, "picture.png", programs=programs, cwd=tmp_path)
    plans = json.loads((tmp_path / "bundle" / "manifest.json").read_text("utf-8"))["plans"]
    assert {(plan["lowering"], plan["precision"], plan["target"]) for plan in plans} == {
        (lowering, "float16", "sm87")
    }
    assert "the engine tensorrt on a GPU that is not there" in said.replace("\n", " ")
    ticks = re.findall(r"^tick \d: .* (?:eos|length|deadline)", said, re.MULTILINE)
    assert len(ticks) == 3
    # The last step of the README, with a trtexec that says how long nothing took.
    fake_trtexec(programs)
    variables = environment() | {"PATH": f"{programs}:{os.environ['PATH']}"}
    profile = [programs / "vlmexport", "profile", "bundle", "--html", "profile.html"]
    subprocess.run(profile, cwd=tmp_path, env=variables, check=True, capture_output=True, timeout=300)
    assert "mm &lt;1&gt;" in (tmp_path / "profile.html").read_text("utf-8"), "layers of the plans"


def test_the_readme_names_what_there_is() -> None:
    text = (EXAMPLE / "README.md").read_text("utf-8")
    for name in re.findall(r"`?((?:examples|tests)/[\w/.]+\.\w+)", text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize(("name", "missing"), [("workstation.sh", "a model"), ("device.sh", "the archive")])
def test_no_arguments_is_one_line(name: str, missing: str) -> None:
    done = subprocess.run([EXAMPLE / name], capture_output=True, text=True)
    assert done.returncode != 0 and missing in done.stderr and done.stderr.count("\n") == 1
