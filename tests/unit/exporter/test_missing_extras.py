"""What is said where an extra is missing: its name, and a command that works for this installation."""

from __future__ import annotations

import importlib.metadata
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from vlmexport.runtime.common import optional_deps

BLOCKED = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "pydantic", "accelerate")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({}, "pip install 'vlmexport[export]'"),
        (
            {"url": "https://example.org/vlmexport-1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'vlmexport[export] @ https://example.org/vlmexport-1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://example.org/vlmexport.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}},
            "pip install 'vlmexport[export] @ git+https://example.org/vlmexport.git'",
        ),
        (
            {"url": "file:///no/such/place", "dir_info": {}},
            "pip install '.[export]' in a checkout of vlmexport (that of this installation, /no/such/place, is gone)",
        ),
    ],
    ids=["index", "archive", "git", "gone"],
)
def test_install_command_follows_the_package_origin(origin: dict, command: str) -> None:
    assert optional_deps.pip_command(origin, extra="export") == command


def test_the_command_of_a_checkout_and_of_a_wheel(tmp_path: Path) -> None:
    checkout = tmp_path / "my checkout"
    checkout.mkdir()
    url = checkout.as_uri()
    assert shlex.split(optional_deps.pip_command({"url": url, "dir_info": {}}, extra="train")) == [
        "pip", "install", f"{checkout}[train]",
    ]  # fmt: skip
    (checkout / "constraints.txt").touch()
    editable = optional_deps.pip_command({"url": url, "dir_info": {"editable": True}}, extra="train")
    assert shlex.split(editable) == [
        "pip", "install", "-c", f"{checkout}/constraints.txt", "-e", f"{checkout}[train]",
    ]  # fmt: skip
    wheel = tmp_path / "vlmexport-1.0-py3-none-any.whl"
    wheel.touch()
    found = optional_deps.pip_command({"url": wheel.as_uri(), "archive_info": {}}, extra="export")
    assert shlex.split(found) == ["pip", "install", f"{wheel}[export]"]


def test_every_extra_that_is_named_exists() -> None:
    declared = importlib.metadata.metadata("vlmexport").get_all("Provides-Extra") or []
    assert set(optional_deps.MODULES) <= set(declared)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["build", "--model", "tiny-blip2-flant5", "-o", "out"], "export"),
        (["models"], "export"),
        (["verify", "bundle", "--model", "tiny-blip2-flant5"], "export"),
        (["train", "--model", "m", "--data", "scenes:train:2", "-o", "out", "--draft-layer", "1"], "train"),
        (["generate-data", "--model", "m", "--data", "scenes:train:2", "-o", "out"], "train"),
        (["eval", "--model", "m", "--data", "scenes:train:2", "--draft", "early-exit@1"], "train"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_without_extras_the_extra_is_named(words: list[str], extra: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}));"
        "from vlmexport.runtime.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert f"`vlmexport {words[0]}` needs the extra [{extra}]" in done.stderr
    assert (
        f"torch, transformers, onnx, onnxscript, onnx_ir, safetensors, pydantic{', accelerate' * (extra == 'train')} are missing): pip install"
        in done.stderr
    )
    assert f"[{extra}]" in done.stderr.rpartition("pip install")[2]
    assert list(tmp_path.iterdir()) == []


def test_plots_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None;"
        "from vlmexport.runtime.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["eval", "--model", "m", "--data", "scenes:train:2", "--draft", "early-exit@1", "--plot", "a.png"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--plot needs the extra [eval] (matplotlib is missing)" in done.stderr
