"""The tiny models are a distribution of their own: found without an import, and named with its command where it is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from vlmexport.exporter.common import tiny_models
from vlmexport.exporter.common.aliases import find_alias
from vlmexport.exporter.common.tiny_models import DISTRIBUTION, find_tiny_models
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.optional_deps import pip_command


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "_MODULE", "vlmexport_tiny_models_of_nobody")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({}, "pip install vlmexport-tiny-models"),
        (
            {"url": "https://example.org/vlmexport.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}},
            "pip install 'vlmexport-tiny-models @ git+https://example.org/vlmexport.git#subdirectory=models'",
        ),
        (
            {"url": "https://example.org/vlmexport-1.0-py3-none-any.whl", "archive_info": {}},
            "pip install ./models in a checkout of vlmexport",
        ),
        (
            {"url": "file:///no/such/place", "dir_info": {}},
            "pip install ./models in a checkout of vlmexport (that of this installation, /no/such/place, is gone)",
        ),
    ],
    ids=["index", "git", "archive", "gone"],
)
def test_install_command_follows_the_package_origin(origin: dict, command: str) -> None:
    assert pip_command(origin, DISTRIBUTION, subfolder="models") == command


def test_the_command_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "my checkout" / "models").mkdir(parents=True)
    url = (tmp_path / "my checkout").as_uri()
    place = f"'{tmp_path}/my checkout/models'"
    assert (
        pip_command({"url": url, "dir_info": {}}, DISTRIBUTION, subfolder="models") == f"pip install {place}"
    )
    assert (
        pip_command({"url": url, "dir_info": {"editable": True}}, DISTRIBUTION, subfolder="models")
        == f"pip install -e {place}"
    )


@pytest.mark.parametrize(
    "words", ["build --model tiny-vit-gpt2 -o out", "fit tiny-vit-gpt2 --target h200"], ids=lambda w: w[:5]
)
def test_a_tiny_model_that_is_not_installed_is_named_with_the_command(
    missing: None, words: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert (
        "model 'tiny-vit-gpt2' is a part of vlmexport-tiny-models, which is not installed: pip install"
        in said
    )
    assert said.count("\n") == 1


def test_a_model_that_the_package_does_not_hold_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of another version."""
    (tmp_path / "vlmexport_tiny_models_of_old").mkdir()
    (tmp_path / "vlmexport_tiny_models_of_old" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tiny_models, "_MODULE", "vlmexport_tiny_models_of_old")
    assert find_tiny_models() == tmp_path / "vlmexport_tiny_models_of_old"
    assert main(["build", "--model", "tiny-vit-gpt2", "-o", str(tmp_path / "out")]) == 2
    assert "which is not installed: pip install" in capsys.readouterr().err


def test_models_are_listed_without_the_package(missing: None, capsys: pytest.CaptureFixture) -> None:
    alias = find_alias("tiny-vit-gpt2")
    assert alias is not None and alias.draft_folders() == []
    assert main(["models"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "tiny-vit-gpt2" in said and "The tiny models (source: bundled) are not installed: pip install" in said
    )


def test_finding_them_imports_nothing() -> None:
    code = (
        "import sys; from vlmexport.exporter.common.tiny_models import tiny_model;"
        "assert (tiny_model('tiny-vit-gpt2') / 'config.json').is_file();"
        "print([n for n in ('vlmexport_tiny_models', 'torch', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
