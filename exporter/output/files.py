"""The list of a bundle's files, and its manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from ...runtime.bundle.manifest import FileInfo, Manifest
from ...runtime.bundle.manifest_file import MANIFEST
from ...runtime.bundle.seal import manifest_text
from ...runtime.common.atomic_files import atomic_write

Progress = Callable[[str, int, int], None]
"""`progress("checksums", bytes done, in all)`."""


def describe_files(
    folder: Path, known: Mapping[str, FileInfo], progress: Progress | None = None
) -> dict[str, FileInfo]:
    """Size and checksum of every file of the folder, the manifest excepted; those of `known` files are not computed
    again (plans have theirs from the moment they were written)."""
    paths = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    paths.pop(MANIFEST, None)
    total, done = sum(p.stat().st_size for name, p in paths.items() if name not in known), 0
    entries = dict(known)
    for name, path in paths.items():
        if name in known:
            continue
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                done += len(block)
                if progress:
                    progress("checksums", done, total)
        entries[name] = FileInfo(bytes=path.stat().st_size, sha256=digest.hexdigest())
    return {name: entries[name] for name in sorted(entries)}


def write_manifest(folder: Path, manifest: Manifest) -> int:
    """Checks the whole manifest as its reader will find it, and writes it; returns its bytes."""
    text = manifest_text(manifest.to_dict())
    Manifest.from_dict(json.loads(text))
    with atomic_write(folder / MANIFEST) as out:
        return out.write(text.encode())
