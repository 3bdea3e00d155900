"""Damaged bundles, and bundles of somebody who means harm: every checksum fits ("signed")."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import (
    linked_copy,
    mutate_bytes,
    mutate_file,
    mutate_json,
    mutate_json_bytes,
)

from .base import answer_of, command, picture

NAMES = ("t5", "llama", "vit-gpt2")
OPTIONS = ("--max-new-tokens", "8")


class Seeds:
    """Whole bundles, and what they answer."""

    def __init__(self, folder: Path, signed: bool):
        from tests.support import tiny_bundles

        self._signed = signed
        whole = folder.parent / "whole-bundles"  # both kinds damage copies of the same
        whole.mkdir(exist_ok=True)
        self._picture = picture(folder / "picture.png")
        self._bundles: list[tuple[Path, tuple[object, ...], str]] = []
        for name in NAMES:
            # In forks of their own: ONNX Runtime's threads must not exist where the cases are forked.
            if tiny_bundles.load(name, whole / name) is None:
                _in_a_fork(folder, lambda n=name: str(tiny_bundles.build(n, whole / n).path))
            seed = tiny_bundles.load(name, whole / name)
            assert seed is not None
            arguments = self._arguments(name)
            self._bundles.append(
                (
                    seed.path,
                    arguments,
                    _in_a_fork(folder, lambda p=seed.path, a=arguments: answer_of("-q", "run", p, *a)),
                )
            )

    def _arguments(self, name: str) -> tuple[object, ...]:
        asked: tuple[object, ...] = () if name == "vit-gpt2" else ("--prompt", "a red cup")
        return (*asked, *(() if name == "llama" else ("--image", self._picture)), *OPTIONS)

    def make(self, rng: random.Random, folder: Path) -> Case:
        source, arguments, expected = rng.choice(self._bundles)
        bundle = linked_copy(source, folder / "bundle")
        names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
        chosen = rng.choice(("manifest.json", "tokenizer.json", "weights.bin", *names, *names))
        if self._signed:
            _change_signed(bundle, chosen, rng)
            return Case(command("run", bundle, *arguments))
        _change(bundle, chosen, rng)
        if (
            chosen == "weights.bin" and rng.random() < 0.5
        ):  # as a weights.bin of gigabytes, whose sum nobody asked for
            return Case(_without_small_sums(command("run", bundle, *arguments)))

        def same(status: int, output: str) -> str | None:
            return None if status == 2 or output == expected else "another answer without a word"

        return Case(command("run", bundle, *arguments), same)


def prepare(folder: Path) -> Seeds:
    """Bundles that were damaged on the way."""
    return Seeds(folder, signed=False)


def prepare_signed(folder: Path) -> Seeds:
    """Bundles whose checksums were made anew."""
    return Seeds(folder, signed=True)


def _change(bundle: Path, chosen: str, rng: random.Random) -> None:
    path = bundle / chosen
    if chosen.endswith(".json") and rng.random() < 0.6:
        mutate_file(path, rng, mutate_json_bytes)
    elif rng.random() < 0.03:
        (bundle / rng.choice(("extra.bin", "plans", "segment.0.onnx.bak"))).write_bytes(b"x")
    elif rng.random() < 0.05:
        other = rng.choice(sorted(p for p in bundle.iterdir() if p.is_file() and p != path) or [path])
        data = other.read_bytes()
        path.unlink()
        path.write_bytes(data)
    else:
        mutate_file(path, rng, mutate_bytes)


def _change_signed(bundle: Path, chosen: str, rng: random.Random) -> None:
    from vlmexport.runtime.bundle.seal import manifest_text

    path, manifest = bundle / chosen, bundle / "manifest.json"
    document = json.loads(manifest.read_bytes())
    if chosen == "manifest.json":
        document = mutate_json(document, rng)
    else:
        data = path.read_bytes()
        path.unlink()
        if chosen.endswith(".json"):
            path.write_bytes(mutate_json_bytes(data, rng))
        else:
            path.write_bytes(mutate_bytes(data, rng))
    if isinstance(document, dict) and isinstance(document.get("files"), dict):
        for name, info in document["files"].items():
            if isinstance(info, dict) and (bundle / name).is_file():
                data = (bundle / name).read_bytes()
                info.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        weights = document.get("weights")
        if isinstance(weights, dict) and chosen != "manifest.json":
            weights["bytes"] = (bundle / "weights.bin").stat().st_size
    manifest.unlink()
    try:
        text = manifest_text(document)
    except (AttributeError, TypeError):  # not an object any more
        text = json.dumps(document)
    manifest.write_bytes(text.encode("utf-8", "surrogatepass"))


def _without_small_sums(serve: Callable[[], int]) -> Callable[[], int]:
    def run() -> int:
        from vlmexport.runtime.bundle import folder

        folder.SMALL = 0
        return serve()

    return run


def _in_a_fork(folder: Path, function: Callable[[], str]) -> str:
    path = folder / "answer"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            path.write_text(function(), "utf-8")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "a whole bundle does not run"
    return path.read_text("utf-8")
