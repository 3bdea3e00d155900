"""Writes the files of a bundle, and replaces an older bundle only when the new one is complete."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...runtime.bundle.folder import MANIFEST, read_manifest
from ...runtime.bundle.manifest import FORMAT, Manifest
from ...runtime.errors import BundleError, ExportError, OptionError
from ..families.base import GraphSpec
from ..graphs.check import check_graph
from ..graphs.weights import STORED_DTYPES, WeightStore

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`; stages are graphs (count), weights and checksums (bytes), parity (count)."""

_DTYPE_NAMES = {
    ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT64: "int64", ir.DataType.BOOL: "bool",
}  # fmt: skip


@contextlib.contextmanager
def replaced_folder(output: Path, force: bool) -> Iterator[Path]:
    """Gives a temporary folder beside `output` that takes its place when the block ends without an exception.

    On any failure, Ctrl-C included, the temporary folder is removed and an existing bundle stays as it was. Raises
    OptionError when `output` exists without `force`, or is something that is not a bundle.
    """
    output = output.absolute()
    _remove_stale(output)
    check_output(output, force)
    work = output.with_name(f".{output.name}.building-{os.getpid()}")
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
    except OSError as error:
        raise OptionError(f"cannot write to {output.parent}: {error.strerror}") from error
    try:
        yield work
        if output.exists():
            output.rename(old)
        work.rename(output)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ExportError(f"no space left on the disk of {output.parent}; nothing was changed") from error
        raise
    finally:
        if old.exists() and not output.exists():
            old.rename(output)  # stopped between the two renames
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def check_output(output: Path, force: bool) -> None:
    """OptionError unless `output` may be written: it is new, empty, or with `force` a bundle and nothing else."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise OptionError(f"{output} exists and is not a folder; choose another -o")
    if not output.exists() or not any(output.iterdir()):
        return
    if not force:
        raise OptionError(f"{output} exists; choose another -o or replace it with --force")
    if not (output / MANIFEST).is_file():
        raise OptionError(f"{output} is not a bundle (no {MANIFEST}), so --force does not replace it")
    try:
        document = read_manifest(output / MANIFEST)
    except BundleError as error:
        raise OptionError(f"{error}; --force replaces bundles only: remove the folder yourself") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise OptionError(f"{output / MANIFEST} is not of a bundle, so --force does not replace {output}")
    files = document.get("files")
    for path in sorted(output.rglob("*")):
        name = path.relative_to(output).as_posix()
        if not path.is_dir() and name != MANIFEST and not (isinstance(files, dict) and name in files):
            raise OptionError(
                f"{path} is not part of the bundle that --force would replace; move it out first"
            )


def check_space(folder: Path, need: int) -> None:
    """ExportError when the disk has fewer than `need` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ExportError(
            f"no space left for the bundle: {need / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free in {folder}"
        )


def _remove_stale(output: Path) -> None:
    """Removes what a killed build left beside `output` (its process is gone); a bundle that it had only moved
    aside comes back."""
    for kind in ("old", "building"):
        for path in output.parent.glob(f".{glob.escape(output.name)}.{kind}-*"):
            pid = path.name.rpartition("-")[2]
            if not pid.isdigit() or _alive(int(pid)):
                continue
            if kind == "old" and not output.exists():
                path.rename(output)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_graphs(folder: Path, graphs: list[GraphSpec], progress: Progress | None = None) -> None:
    """Writes every graph next to the (written) weights and checks it."""
    for done, spec in enumerate(graphs, 1):
        path = folder / f"{spec.name}.onnx"
        ir.save(spec.model, path)
        check_graph(path)
        if progress:
            progress("checks", done, len(graphs))


def describe_graph(spec: GraphSpec) -> dict[str, Any]:
    """A graph's entry in the manifest."""
    graph = spec.model.graph
    entry: dict[str, Any] = {"file": f"{spec.name}.onnx", "role": spec.role}
    if spec.layers is not None:
        entry["layers"] = list(spec.layers)
    entry["inputs"] = [describe_value(v) for v in graph.inputs]
    entry["outputs"] = [describe_value(v) for v in graph.outputs]
    return entry


def describe_value(value: ir.Value) -> dict[str, Any]:
    """Name, dtype and shape of a graph's input or output."""
    assert value.shape is not None and value.dtype is not None
    shape = [d if isinstance(d, int) else str(d.value) for d in value.shape]
    return {"name": value.name, "dtype": _DTYPE_NAMES[value.dtype], "shape": shape}


def describe_tensors(store: WeightStore, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's `tensors`."""
    entries = {}
    for name, ref in tensors.items():
        slot = store.slot(ref)
        assert ref.dtype in STORED_DTYPES
        entries[name] = {
            "offset": slot.offset,
            "bytes": slot.bytes,
            "dtype": ref.dtype,
            "shape": list(ref.shape),
        }
    return entries


def describe_files(folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Size and checksum of every file of the folder, the manifest excepted."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    total, done = sum(p.stat().st_size for p in paths), 0
    entries = {}
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                done += len(block)
                if progress:
                    progress("checksums", done, total)
        name = path.relative_to(folder).as_posix()
        entries[name] = {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    return entries


def check_description(document: Mapping[str, Any]) -> None:
    """Checks a manifest before its files exist: what the runtime would refuse is refused before weights are written."""
    names = [document["weights"]["file"], document["text"]["tokenizer"]]
    names += [graph["file"] for graph in document["graphs"].values()]
    files = {name: {"bytes": 0, "sha256": ""} for name in names}
    Manifest.from_dict(json.loads(json.dumps({**document, "files": files})))


def write_manifest(folder: Path, document: Mapping[str, Any]) -> Manifest:
    """Checks the manifest with the runtime's own reader and writes it."""
    manifest = Manifest.from_dict(json.loads(json.dumps(document)))
    path = folder / f"{MANIFEST}.new"
    path.write_text(json.dumps(manifest.to_dict(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    path.replace(folder / MANIFEST)
    return manifest
