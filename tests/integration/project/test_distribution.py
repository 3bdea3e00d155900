"""The wheel and the sdist that would be published: what is in them, and that they run outside the checkout.

Nothing is downloaded: the build backend and the dependencies are those of the environment that runs the tests.
"""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BACKEND = 77
"""The release of setuptools that pyproject.toml asks for."""
ROOMS = ("runtime", "exporter", "calibration")
TAKEN = ("src", "pyproject.toml", "README.md", "LICENSE")
"""What a build reads of the tree; the rooms by the links in src/."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None
    or int(importlib.metadata.version("setuptools").partition(".")[0]) < BACKEND,
    reason=f"building without a network needs setuptools >= {BACKEND} in this environment: pip install -U setuptools",
)


def build(what: str, tree: Path, out: Path) -> Path:
    """What pip does after it has made an environment for the backend."""
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    (folder / "tree").mkdir()
    for name in TAKEN:
        copy(ROOT / name, folder / "tree" / name)
    return build("sdist", folder / "tree", folder / "dist")


def copy(source: Path, to: Path) -> None:
    """A file or a folder, without what builds leave there."""
    if source.is_file():
        shutil.copy(source, to)
    else:
        shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))


def wheel_of(sdist: Path, folder: Path) -> Path:
    """Built from the sdist, as from an index: the sdist must hold all that it needs."""
    shutil.unpack_archive(sdist, folder)  # our own archive: Python 3.11.0 to 3.11.3 know no filter
    (tree,) = [p for p in folder.iterdir() if p.is_dir()]
    return build("wheel", tree, folder / "dist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def models_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    copy(ROOT / "models", folder / "tree")
    return wheel_of(build("sdist", folder / "tree", folder / "dist"), tmp_path_factory.mktemp("models-wheel"))


def environment(folder: Path, *wheels: Path) -> Path:
    """A fresh environment with the wheels; dependencies are those of the environment that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", "--no-deps",
         "--disable-pip-version-check", *map(str, wheels)],
        check=True,
    )  # fmt: skip
    (packages,) = (folder / "lib").glob("python*/site-packages")
    others = [p for p in sys.path if Path(p).name == "site-packages" and Path(p).is_dir()]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")  # their own .pth files are not read
    return folder


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("venv"), wheel)


@pytest.fixture(scope="module")
def with_models(wheel: Path, models_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("venv"), wheel, models_wheel)


def run(installed: Path, cwd: Path, *command: object) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        [str(installed / "bin" / str(command[0])), *map(str, command[1:])],
        cwd=cwd, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip


def test_the_wheel_holds_what_the_tree_holds_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = email.message_from_bytes(
            archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA")))
        )
    expected = {
        f"{place}{path.relative_to(ROOT / folder).as_posix()}"
        for place, folder in (("", "src"), *((f"vlmexport/{room}/", room) for room in ROOMS))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "vlmexport.egg-info"} & set(path.parts)
    }
    assert names == expected
    assert wheel.stat().st_size < 1.5e6  # a robot installs it
    assert re.fullmatch(r"vlmexport-[0-9.]+-py3-none-any\.whl", wheel.name)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"gpu", "export", "train", "optimum"} <= set(metadata.get_all("Provides-Extra") or [])


def test_the_runtime_runs_outside_the_checkout_without_torch(
    installed: Path, tiny_bundle: Callable, tmp_path: Path
) -> None:
    bundle = tiny_bundle("llama").path
    code = f"""
import json, sys
from vlmexport.runtime import Session
import vlmexport.runtime
with Session.load({str(bundle)!r}) as session:
    tokens = session.generate(prompt="the red cup", max_new_tokens=8).tokens
assert vlmexport.Session is Session and vlmexport.__version__
print(json.dumps({{"file": vlmexport.runtime.__file__, "tokens": [int(t) for t in tokens], "heavy": [
    name for name in ("torch", "transformers", "onnx", "pydantic", "vlmexport.exporter") if name in sys.modules]}}))
"""
    done = run(installed, tmp_path, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["file"]).is_relative_to(installed) and found["heavy"] == []
    done = run(
        installed,
        tmp_path,
        "vlmexport",
        "run",
        bundle,
        "--prompt",
        "the red cup",
        "--max-new-tokens",
        8,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == found["tokens"] and len(found["tokens"]) == 8
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_of_the_models_holds_their_files(models_wheel: Path) -> None:
    with zipfile.ZipFile(models_wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    folder = ROOT / "models" / "vlmexport_tiny_models"
    files = [f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert names == {path.relative_to(folder.parent).as_posix() for path in files}
    assert models_wheel.stat().st_size < 60e6  # an index takes 100 MB


def test_the_exporter_finds_its_model_and_drafts_outside_the_checkout(
    with_models: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    done = run(with_models, tmp_path, "vlmexport", "models", "--json")
    assert done.returncode == 0, done.stderr
    drafts = {m["alias"]: m["drafts"] for m in json.loads(done.stdout)["models"] if m["source"] == "bundled"}
    cross_attending, reading_pictures = ("tiny-blip2-flant5", "tiny-vit-gpt2"), ("tiny-qwen2.5-vl",)
    heads = ["imitation@3", "imitation@6", "medusa"]
    layers = ["imitation@3", "imitation@6", "eagle", "medusa", "vispec"]
    assert drafts == dict.fromkeys(cross_attending, heads) | dict.fromkeys(reading_pictures, layers)
    for name in reading_pictures:
        options = ("--model", name, "-o", tmp_path / "bundle", "--draft-layer", 99)
        done = run(with_models, tmp_path, "vlmexport", "build", *options)
        # It has read the configuration and the weights' header.
        assert done.returncode == 2 and "this decoder has 12 layers" in done.stderr


def test_without_the_models_the_command_that_installs_them_is_named(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if any(
        (Path(place) / "vlmexport_tiny_models").exists() for place in sys.path if "site-packages" in place
    ):
        pytest.skip("this environment has the tiny models among its packages")
    options = ("--model", "tiny-blip2-flant5", "-o", tmp_path / "bundle")
    done = run(installed, tmp_path, "vlmexport", "build", *options)
    assert done.returncode == 2
    assert done.stderr.endswith("not installed: pip install ./models in a checkout of vlmexport\n"), (
        done.stderr
    )


def test_a_missing_extra_is_added_to_the_wheel_that_was_installed(
    installed: Path, wheel: Path, tmp_path: Path
) -> None:
    code = (
        "from vlmexport.runtime.common.optional_deps import install_command; print(install_command('export'))"
    )
    done = run(installed, tmp_path, "python", "-c", code)
    assert done.stdout.strip() == f"pip install '{wheel}[export]'", done.stderr


def test_optimum_finds_the_command(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("optimum.commands.optimum_cli", reason="optimum is not installed")
    done = run(
        installed, tmp_path, "python", "-m", "optimum.commands.optimum_cli", "export", "vlmexport", "--model", "nope",
        "-o", tmp_path / "bundle",
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("vlmexport: unknown model 'nope'"), done.stderr
