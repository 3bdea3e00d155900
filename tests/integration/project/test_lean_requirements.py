"""The list of packages for a robot: complete, and enough to serve a request."""

from __future__ import annotations

import importlib.metadata as metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LEAN = Path(__file__).parents[3] / "requirements-lean.txt"
HUB = "huggingface-hub"
"""What `tokenizers` asks for, to download tokenizers by name."""


def needed(name: str, without: frozenset[str] = frozenset()) -> set[str]:
    """Names of all distributions that `name` needs here, itself included, extras left out."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = canonicalize_name(waiting.pop())
        if one in found or one in without:
            continue
        found.add(one)
        for line in metadata.requires(one) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def modules(distribution: str) -> set[str]:
    """Top-level modules of an installed distribution."""
    tops = {
        path.parts[0].removesuffix(".py")
        for path in metadata.files(distribution) or []
        if path.suffix == ".py" and not path.parts[0].startswith("..")
    }
    return {top for top in tops if not top.endswith((".dist-info", ".data"))}


def test_the_list_is_what_the_runtime_needs_without_the_hub() -> None:
    lines = [line for line in LEAN.read_text().splitlines() if line and not line.startswith("#")]
    listed = {canonicalize_name(Requirement(line).name) for line in lines}
    assert listed == needed("vlmexport", frozenset({HUB})) - {"vlmexport"}
    declared = {
        Requirement(line).name: str(Requirement(line).specifier)
        for line in metadata.requires("vlmexport") or []
    }
    typer = next(Requirement(line) for line in lines if line.startswith("typer"))
    assert str(typer.specifier) in declared["typer"]


def test_a_request_is_served_without_the_rest(tiny_bundle: Callable) -> None:
    lean = needed("vlmexport", frozenset({HUB}))
    rest = needed("vlmexport") - lean
    if not rest:
        pytest.skip("this tokenizers asks for no hub")
    assert HUB in rest
    kept = set().union(*(modules(name) for name in lean if name != "vlmexport"))
    blocked = set().union(*(modules(name) for name in rest)) - kept
    assert {"huggingface_hub", "hf_xet"} & blocked
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
from vlmexport.runtime.cli import main
sys.exit(main())
"""
    command = [sys.executable, "-c", code, "run", str(tiny_bundle("llama").path), "--prompt", "a red cup"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
