"""`--link-weights`: the checkpoint's own safetensors files as hard links in the bundle, in place of a copy of its tensors.

A hard link is the file itself under a second name: no further disk is taken, a copy of the bundle is whole, and the
checkpoint may be deleted. Who writes into the checkpoint's file writes into the bundle, which its checksum tells.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...runtime.bundle.schema import file_name
from ...runtime.common.errors import BundleError, OptionError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..checkpoint.tensors import TensorFiles

OPTION = "--link-weights"


def check_links(tensors: TensorFiles, dtype: str, output: Path) -> None:
    """OptionError where no tensor could stay in its file: none is stored in safetensors as `dtype`, or `output` is on
    another file system."""
    places = [place for name in tensors if (place := tensors.place(name)) is not None]
    if not places:
        raise OptionError(
            f"{OPTION}: the weights in {tensors.folder} are not safetensors files; leave the option out"
        )
    linked = {place.file for place in places if place.dtype == dtype}
    if not linked:
        kinds = sorted({place.dtype for place in places})
        raise OptionError(
            f"{OPTION}: {tensors.folder} stores {', '.join(kinds)} and the bundle {dtype}; add --precision "
            f"{kinds[0]}, or leave the option out"
        )
    place = next(path for path in (output.absolute().parent, *output.absolute().parents) if path.exists())
    for file in sorted(linked):
        try:
            file_name(file.name, "")
        except BundleError as error:
            raise OptionError(
                f"{OPTION}: {file} has a name that no file of a bundle may have; rename it"
            ) from error
        if file.exists() and file.stat().st_dev != place.stat().st_dev:
            raise _elsewhere(file, place)


@contextlib.contextmanager
def linked_shards(shards: Mapping[str, Path], folder: Path) -> Iterator[None]:
    """Within, empty files stand for the shards; then links to them take their place.

    ONNX's checker asks for the files that a graph names, and refuses one of several names, which might be somebody
    else's (ONNX Runtime reads it). Raises OptionError where the file system refuses.
    """
    for name in shards:
        (folder / name).touch()
    yield
    for name, file in shards.items():
        real = file.resolve()  # the hub's cache holds links to its files
        try:
            (folder / name).unlink()
            os.link(real, folder / name)
        except OSError as error:
            raise_if_foreign(error)
            if error.errno == errno.EXDEV:
                raise _elsewhere(real, folder) from error
            raise OptionError(
                f"{OPTION}: {real} cannot be linked to ({error.strerror}): the file system has no hard links, or the file "
                "is another user's; leave the option out"
            ) from error


def _elsewhere(file: Path, place: Path) -> OptionError:
    return OptionError(
        f"{OPTION}: {file} and {place} are on different file systems; choose an -o beside the model, or leave the "
        "option out"
    )
