"""The commands that are killed: what is there before, what is typed, and what may differ between two runs of them.

A scene has a folder of its own, whose path is the same in every run, because outputs may hold paths: `world` is what a
command writes to, `inputs` is what it reads.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMES = frozenset(("created", "tokens_per_second", "seconds", "million_numbers_per_core_second"))
"""Fields of JSON that hold a time or a speed, whatever they are in. Nothing else is left out of a comparison but the manifest's
checksum, which covers them, and TensorBoard's files, whose names hold a time."""
MEASURED = frozenset(("costs", "acceptance"))
"""Fields of a manifest that `tune` measures."""

Content = dict[str, bytes]


def run(*words: object) -> int:
    """A command of `vlmexport` in this process."""
    from vlmexport.runtime.cli import main

    return main([str(word) for word in words])


@dataclass(frozen=True)
class Scene:
    """One command.

    words: of the command, of (world, inputs).
    before: makes what is in the world before, and what is read, in (world, inputs).
    whole: names in the world, with wildcards, that hold at any time what they held before, or what they hold in the end, or
        one of the versions that they have after the functions named by `versions` ("module:Class.method").
    remedies: what a refusal may name, and the words to add to the command then.
    measured: whether the manifest holds what was measured.
    warm: whether the command may run in the process that is forked for every case, so that what torch traces is kept.
    stub: changes the process that runs the command.
    serve: what runs the words.
    """

    words: Callable[[Path, Path], list[object]]
    before: Callable[[Path, Path], None]
    whole: tuple[str, ...]
    versions: tuple[str, ...] = ()
    remedies: tuple[tuple[str, tuple[str, ...]], ...] = ()
    measured: bool = False
    warm: bool = False
    stub: Callable[[], None] = lambda: None
    serve: Callable[..., int] = run


def content(folder: Path, hidden: bool = True, measured: bool = False) -> Content:
    """Every file of a folder, or a file, without what holds times; folders that are empty as well. Without `hidden` also
    without files that are being written."""
    found: Content = {}
    if folder.is_file():
        return {"": _compared(folder.name, folder.read_bytes(), measured)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "tensorboard" in path.parts or (not hidden and _unfinished(name)):
            continue
        if path.is_dir():
            if not any(path.iterdir()):
                found[name + "/"] = b""
            continue
        found[name] = _compared(path.name, path.read_bytes(), measured)
    return found


def _unfinished(name: str) -> bool:
    return any(part.startswith(".") or part.endswith(".new") for part in name.split("/"))


def _compared(name: str, data: bytes, measured: bool) -> bytes:
    """The content of a file without fields that hold times."""
    if name == "state.pt":
        return _state(data)
    if not name.endswith((".json", ".jsonl")):
        return data
    with contextlib.suppress(ValueError):
        values = (
            [json.loads(line) for line in data.splitlines()] if name.endswith("l") else [json.loads(data)]
        )
        if name == "manifest.json":
            gone = {"sha256"} | (MEASURED if measured else frozenset())
            values = [{k: v for k, v in value.items() if k not in gone} for value in values]
        return json.dumps([_timeless(value) for value in values]).encode()
    return data


def _state(data: bytes) -> bytes:
    """What a training's state holds. Its own bytes tell, too, which equal strings are one object."""
    import torch

    parts: list[str] = []

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                parts.append(repr(key))
                add(inner)
        elif isinstance(value, list | tuple):
            parts.append(str(len(value)))
            for inner in value:
                add(inner)
        elif torch.is_tensor(value):
            parts.append(f"{value.dtype} {list(value.shape)} {value.numpy().tobytes().hex()}")
        else:
            parts.append(repr(value))

    try:
        add(torch.load(io.BytesIO(data), weights_only=True))
    except Exception:  # cut off: not equal to a whole one
        return data
    return "\n".join(parts).encode()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in TIMES}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def quietly(*words: object) -> None:
    """A command that must succeed."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = run("-q", *words)
    assert status == 0, f"{words} ends with {status}: {said.getvalue()}"


@contextlib.contextmanager
def place(folder: Path) -> Iterator[None]:
    """Caches and temporary files go below `folder`."""
    import tempfile

    before = dict(os.environ)
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    os.environ.update(VLMEXPORT_CACHE=str(folder / "world" / "cache"), TMPDIR=str(folder / "tmp"))
    tempfile.tempdir = None
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None


def _model(inputs: Path) -> Path:
    from tests.support import tiny_models

    folder = inputs / "model"
    return folder if folder.is_dir() else tiny_models.checkpoint("llama", folder)


def _data(inputs: Path, count: int = 8) -> Path:
    from tests.support.training_targets import make_jsonl

    return make_jsonl(inputs / "data.jsonl", count, images=False)


def _draft(inputs: Path) -> Path:
    from tests.support import tiny_bundles

    return tiny_bundles.untrained_layer(_model(inputs), inputs / "draft")


_LIMITS = ("--max-length", 96, "--max-batch", 2, "--max-width", 8)


def _bundle(folder: Path, inputs: Path, *words: object) -> Path:
    quietly("build", "--model", _model(inputs), "-o", folder, *_LIMITS, *(words or ("--draft-layer", 1)))
    return folder


def _older_bundle(world: Path, inputs: Path) -> None:
    _bundle(world / "bundle", inputs, "--draft", "prompt-lookup")


def _build(*more: object) -> Callable[[Path, Path], list[object]]:
    def words(world: Path, inputs: Path) -> list[object]:
        return [
            "build", "--model", inputs / "model", "-o", world / "bundle", *_LIMITS, "--draft-layer", 1, *more,
        ]  # fmt: skip

    return words


def _nothing(world: Path, inputs: Path) -> None:
    _model(inputs)


def _before_export(world: Path, inputs: Path) -> None:
    _draft(inputs)


def _before_compile(world: Path, inputs: Path) -> None:
    """A bundle that has plans for the target already."""
    _stub_tensorrt()
    _older_bundle(world, inputs)
    quietly("compile", world / "bundle", *_COMPILE, "--lowering", "portable")


_COMPILE = ("--backend", "tensorrt-rtx", "--target", "sm86")


def _stub_tensorrt() -> None:
    """TensorRT builds nothing: a plan names its graph and its options. What is written, and when, is as ever."""
    from collections import Counter

    from vlmexport.exporter.tensorrt import plans
    from vlmexport.exporter.tensorrt.builder import BuiltPlan
    from vlmexport.exporter.tensorrt.graph_copy import copy_graph, symbolic_shapes
    from vlmexport.exporter.tensorrt.network import NetworkSummary

    def build(
        library: Any, capability: Any, source: Path, scratch: Path, options: Any, profiles: Any, lean: Any
    ) -> BuiltPlan:
        copied = copy_graph(source, scratch, options)
        data = f"{source.name} {options.lowering}".encode() * 1000
        inputs, outputs = symbolic_shapes(copied.path)
        bindings = [dict.fromkeys(shapes, ("float32", ())) for shapes in (inputs, outputs)]
        summary = NetworkSummary(Counter(), *bindings, {}, ())
        return BuiltPlan(data, len(data), copied, summary, None, inputs, outputs)

    plans.build_plan = build  # type: ignore[assignment]


def _before_calibrate(world: Path, inputs: Path) -> None:
    _bundle(world / "bundle", inputs)
    _data(inputs, 3)


def _before_merge(world: Path, inputs: Path) -> None:
    _before_calibrate(world, inputs)
    shutil.copytree(world / "bundle", inputs / "other")
    quietly("tune", inputs / "other", "--data", inputs / "data.jsonl", *_CALIBRATE)


_CALIBRATE = ("--max-new-tokens", 6, "--repeats", 1, "--minutes", 0.01)


def _train(draft: str, *more: object) -> Callable[[Path, Path], list[object]]:
    def words(world: Path, inputs: Path) -> list[object]:
        return [
            "train", "--model", inputs / "model", "--data", inputs / "data.jsonl", "-o", world / "run", "--draft", draft,
            "--steps", 4, "--batch-size", 2, "--save-every", 1, "--eval-every", 1, "--warmup", 0, "--device", "cpu",
            *(str(word).replace("WORLD", str(world)) for word in more),
        ]  # fmt: skip

    return words


def _before_train(world: Path, inputs: Path) -> None:
    _model(inputs)
    _data(inputs)


_TRAINED = (
    "vlmexport.calibration.training.trainer:Trainer._validate",
    "vlmexport.calibration.training.trainer:Trainer._save",
)


def _small_batches() -> None:
    """A cache notes after 8 batches how far it is: of two records each, so that few records do."""
    from functools import partial

    from vlmexport.calibration.features.features import build_cache
    from vlmexport.calibration.features.text_cache import build_text_cache
    from vlmexport.calibration.training import run as training

    training.build_cache = partial(build_cache, batch_size=2)  # type: ignore[assignment]
    training.build_text_cache = partial(build_text_cache, batch_size=2)  # type: ignore[assignment]


def _training(draft: str, *more: object, records: int = 8) -> Scene:
    def before(world: Path, inputs: Path) -> None:
        _model(inputs)
        _data(inputs, records)

    return Scene(_train(draft, *more), before, ("run/best", "run/last"), _TRAINED, stub=_small_batches)


def _generate(world: Path, inputs: Path) -> list[object]:
    return [
        "generate-data", "--model", inputs / "model", "--data", inputs / "data.jsonl", "-o", world / "data",
        "--max-new-tokens", 6, "--shard-size", 2, "--batch-size", 2, "--engine", "runtime", "--device", "cpu",
    ]  # fmt: skip


def _before_caption(world: Path, inputs: Path) -> None:
    import numpy as np
    from PIL import Image

    from tests.support import tiny_models

    model = tiny_models.checkpoint("vit-gpt2", inputs / "seeing")
    quietly("build", "--model", model, "-o", inputs / "bundle", *_LIMITS, "--draft", "prompt-lookup")
    (inputs / "pictures").mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 9, 3), np.uint8)
        Image.fromarray(pixels).save(inputs / "pictures" / f"{number}.png")


def _caption(out: str) -> Callable[[Path, Path], list[object]]:
    def words(world: Path, inputs: Path) -> list[object]:
        return [
            "caption", inputs / "bundle", inputs / "pictures", "-o", world / out, "--shard-size", 2, "--max-new-tokens", 4,
        ]  # fmt: skip

    return words


def _before_join(world: Path, inputs: Path) -> None:
    _before_train(world, inputs)
    for number in (0, 1):
        part = inputs / f"part-{number}"
        quietly(*_generate(world, inputs), "--engine", "torch", "--part", f"{number}/2", "-o", part)


SCENES: dict[str, Scene] = {
    "build": Scene(_build(), _nothing, ("bundle",), remedies=(("--force", ("--force",)),), warm=True),
    "build --force": Scene(_build("--force"), _older_bundle, ("bundle",), warm=True),
    "compile": Scene(
        lambda world, inputs: ["compile", world / "bundle", *_COMPILE],
        _before_compile, ("bundle",), warm=True, stub=_stub_tensorrt,
    ),
    "tune": Scene(
        lambda world, inputs: ["tune", world / "bundle", "--data", inputs / "data.jsonl", *_CALIBRATE],
        _before_calibrate, ("bundle",), measured=True,
    ),
    "tune --merge": Scene(
        lambda world, inputs: ["tune", world / "bundle", "--merge", inputs / "other"],
        _before_merge, ("bundle",), warm=True,
    ),
    "train imitation": _training("imitation", "--draft-layer", 1),
    "train --cache-features": _training("imitation", "--draft-layer", 1, "--cache-features", "WORLD/features", records=40),
    "train eagle": _training("eagle", "--cache-features", "WORLD/features", records=40),
    "train --joint": _training("medusa", "--joint", "--heads", 2),
    "generate-data": Scene(_generate, _before_train, ("data/shard-*", "cache/bundles/*"), warm=True),
    "generate-data --part": Scene(
        lambda world, inputs: [*_generate(world, inputs), "--part", "0/2"],
        _before_train, ("data/shard-*", "cache/bundles/*"), warm=True,
    ),
    "generate-data --join": Scene(
        lambda world, inputs: ["generate-data", "--join", inputs / "part-0", inputs / "part-1", "-o", world / "data"],
        _before_join, ("data",), warm=True,
    ),
    "caption": Scene(_caption("captions"), _before_caption, ("captions/captions-*",), warm=True),
    "caption FILE": Scene(_caption("captions.parquet"), _before_caption, ("captions.parquet",), warm=True),
    "quantize": Scene(
        lambda world, inputs: [
            "quantize", "--model", inputs / "model", "--data", inputs / "data.jsonl", "-o", world / "out", "--device", "cpu",
        ],
        _before_train, ("out",), remedies=(("choose another -o", ("-o", "OTHER")),), warm=True,
    ),
    "export-draft": Scene(
        lambda world, inputs: ["export-draft", inputs / "draft", "-o", world / "out", "--model", inputs / "model"],
        _before_export, ("out",), remedies=(("choose another -o", ("-o", "OTHER")),),
    ),
}  # fmt: skip
"""The scenes by name. All run in seconds on tiny random models."""


def units(scene: Scene, world: Path) -> Iterator[Path]:
    """What must be whole and is there."""
    for pattern in scene.whole:
        yield from sorted(path for path in world.glob(pattern) if not _lock(path.name))


def _lock(name: str) -> bool:
    return name.startswith(".") or bool(re.search(r"\.(lock|new)$", name))
