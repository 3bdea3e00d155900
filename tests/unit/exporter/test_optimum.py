"""`optimum-cli export vlmexport` is `vlmexport build`: the real command of optimum, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vlmexport.runtime.cli import main

pytest.importorskip(
    "optimum.commands.optimum_cli", reason="optimum is not installed: pip install '.[optimum]'"
)

REGISTER = Path(__file__).resolve().parents[3] / "src" / "optimum" / "commands" / "register"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH on which optimum finds the registration, where the installation is not of this tree."""
    own = os.environ.get("PYTHONPATH", "")
    spec = importlib.util.find_spec("optimum.commands.register")
    places = list(spec.submodule_search_locations or []) if spec else []
    if any(Path(place).resolve() == REGISTER.resolve() for place in places):
        return own
    commands = tmp_path_factory.mktemp("path") / "optimum" / "commands"
    commands.mkdir(parents=True)
    (commands / "register").symlink_to(REGISTER)
    return os.pathsep.join(filter(None, [own, str(commands.parents[1])]))


def optimum(path: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "vlmexport", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_bundle_from_optimum_is_that_of_build(
    path: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    model = tiny_checkpoint("llama")
    words = ("--model", model, "--draft-layer", 1, "--max-length", 96, "--draft", "early-exit", "--draft", "prompt-lookup",
             "--json")  # fmt: skip
    done = optimum(path, *words, "--output", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    capfd.readouterr()
    assert main([*map(str, ("build", *words)), "-o", str(tmp_path / "two")]) == 0
    first, second = json.loads(done.stdout), json.loads(capfd.readouterr().out)
    told = {"output", "seconds", "stages", "bytes"}  # the manifest holds the time
    assert {k: v for k, v in first.items() if k not in told} == {
        k: v for k, v in second.items() if k not in told
    }
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "two").iterdir())
    for name in set(files) - {"manifest.json"}:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "tiny-blip2-flant", "-o", "OUT"],
        ["--model", "tiny-blip2-flant5", "-o", "OUT", "--draft-layer", "99"],
        pytest.param(
            ["--model", "tiny-blip2-flant5", "-o", "OUT", "--draft-layer", "two"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["--model", "tiny-blip2-flant5", "-o", "OUT", "--precision", "int3", "--dry-run"],
            marks=pytest.mark.slow,
        ),
        ["-o", "OUT"],
    ],
    ids=["model", "layer", "type", "precision", "missing"],
)
def test_errors_are_those_of_build(
    path: str, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    given = [str(tmp_path / "bundle") if word == "OUT" else word for word in words]
    done = optimum(path, *given)
    capfd.readouterr()
    status = main(["build", *given])
    said = capfd.readouterr().err
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said) and status == 2
    assert list(tmp_path.iterdir()) == []


def test_the_options_are_those_of_build(path: str, capfd: pytest.CaptureFixture) -> None:
    done = optimum(path, "--help")
    assert done.returncode == 0, done.stderr
    main(["build", "--help-all"])
    names = set(re.findall(r"--[a-z][a-z-]+", capfd.readouterr().out)) - {"--dry", "--help-all"}
    assert {"--model", "--draft-layer", "--parity-memory"} <= names
    assert names <= set(re.findall(r"--[a-z][a-z-]+", done.stdout))


def test_registering_imports_nothing_heavy(path: str) -> None:
    code = (
        "import sys; from optimum.commands.register import register_vlmexport as r; r.build_options();"
        "print([m for m in ('torch', 'transformers', 'onnx', 'onnxruntime', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
        check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr
