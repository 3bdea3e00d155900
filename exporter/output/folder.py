"""Replaces an older bundle only when the new one is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from ...runtime.bundle.manifest import FORMAT
from ...runtime.bundle.manifest_changes import is_own, locked
from ...runtime.bundle.manifest_file import MANIFEST, read_manifest
from ...runtime.commands.output import size
from ...runtime.common.errors import BundleError, ExportError, OptionError
from ...runtime.common.foreign_errors import raise_if_foreign
from ...runtime.common.locks import only_one, release, remove_left
from ..common.write_errors import FULL, unwritable
from .exchange import take_place
from .leftovers import new_folder, remove_leftovers


@contextlib.contextmanager
def replaced_folder(
    output: Path, force: bool, finish: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Gives a temporary folder beside `output` that takes its place when the block ends without an exception.

    While the folders are exchanged nobody can change the manifest of a bundle in `output`. With `finish` it is called
    with the temporary folder just before, under the same lock, and any number of processes may be inside the block; without,
    a second one is refused at once: it would work for nothing.

    On any failure, Ctrl-C included, the temporary folder and the parents that were made for it are removed and an
    existing bundle stays as it was. Raises OptionError when `output` exists without `force`, is something that is not a
    bundle, or another process makes it.
    """
    output = output.absolute()
    check_output(output, force)
    made = [parent for parent in (output.parent, *output.parent.parents) if not parent.exists()]
    with contextlib.ExitStack() as undone:
        undone.callback(_remove_empty, made, output)
        work = _work_folder(output, force, finish is None, undone)
        held = undone.enter_context(contextlib.ExitStack())
        try:
            yield work
            if (output / MANIFEST).is_file() and os.access(output, os.W_OK | os.X_OK):
                held.enter_context(locked(output))
            if finish is not None:
                finish(work)
            take_place(work, output)
        except OSError as error:
            if error.errno in FULL:
                raise ExportError(
                    f"no space left on the disk of {output.parent}; nothing was changed"
                ) from error
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _work_folder(output: Path, force: bool, only: bool, undone: contextlib.ExitStack) -> Path:
    """A temporary folder, whose lock, and with `only` that of `output`, is held until `undone`. OptionError."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if only:
            undone.enter_context(only_one(_lock(output), output, kept=False))
        remove_leftovers(output)
        check_output(output, force)  # once more: another process may have made it, or a leftover was put back
        work, lock = new_folder(output)
    except OSError as error:
        raise_if_foreign(error)
        raise unwritable(output.parent, error) from error
    undone.callback(release, lock)
    return work


def refuse_existing(output: Path, remedy: str) -> NoReturn:
    """OptionError; a lock that is left of a process which was killed when its output was complete goes."""
    remove_left(_lock(output))
    raise OptionError(f"{output} exists; {remedy}")


def _lock(output: Path) -> Path:
    """Held by the process that makes `output`."""
    return output.with_name(f".{output.name}.lock")


def _remove_empty(made: list[Path], output: Path) -> None:
    if not output.exists():
        with contextlib.suppress(OSError):  # somebody else uses the folder by now
            for parent in made:
                parent.rmdir()


def check_output(output: Path, force: bool) -> None:
    """OptionError unless `output` may be written: it is new, empty, or with `force` a bundle and nothing else."""
    place = next(path for path in (output.absolute().parent, *output.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OptionError(f"cannot write to {place}; choose another -o")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise OptionError(f"{output} exists and is not a folder; choose another -o")
    if not output.exists() or not any(output.iterdir()):
        return
    if not force:
        refuse_existing(output, "choose another -o or replace it with --force")
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
        if not path.is_dir() and not is_own(name) and not (isinstance(files, dict) and name in files):
            raise OptionError(
                f"{path} is not part of the bundle that --force would replace; move it out first"
            )


def check_space(folder: Path, need: int, bound: str = "") -> None:
    """ExportError when the disk of `folder` (which need not exist yet) has fewer than `need` bytes left."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < need:
        raise ExportError(
            f"no space left for the bundle: {bound}{size(need)} needed, {size(free)} free in {place}"
        )
