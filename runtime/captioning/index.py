"""The pictures of a run: files, all files below a folder, and rows of Parquet tables, in one order."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..common.errors import ImageError
from ..common.paths import look_at, path_text
from ..images.folder import pictures_below
from .table import Table

Picture = os.PathLike[str] | bytes | ImageError
"""What `Session` reads as an image, or why a row has none."""


class Source(Protocol):
    """Pictures that come from one place."""

    keys: Sequence[str]
    """What names each of them in the output, in their order."""

    def pictures(self, rows: Sequence[int]) -> Iterator[tuple[int, Picture]]:
        """(row, picture) of some rows, which ascend."""
        ...


class Files:
    """A `Source` of picture files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.keys: Sequence[str] = [str(path) for path in paths]

    def pictures(self, rows: Sequence[int]) -> Iterator[tuple[int, Picture]]:
        """See `Source`."""
        for row in rows:
            yield row, self._paths[row]


class Index:
    """All pictures of a run, one source behind the other.

    Args:
        names: files of pictures, folders, and tables, whose names end in `.parquet`.
        image_column: of tables. key_column: of tables; None: the picture's path, or the number of its row.

    Raises:
        ImageError: a name of nothing, or a folder without pictures. OptionError: a column that a table has not, or holds no
        pictures. InputError: a table that cannot be read.
    """

    def __init__(
        self, names: Sequence[Path], image_column: str = "image", key_column: str | None = None
    ) -> None:
        self._sources = list(_opened(names, image_column, key_column))
        self.keys = [key for source in self._sources for key in source.keys]

    def __len__(self) -> int:
        return len(self.keys)

    def identity(self) -> str:
        """Hash of all keys in their order."""
        digest = hashlib.sha256()
        for key in self.keys:
            name = key.encode("utf-8", "surrogatepass")
            digest.update(len(name).to_bytes(8, "big") + name)
        return digest.hexdigest()

    def pictures(self, rows: Sequence[int]) -> Iterator[tuple[int, Picture]]:
        """(row, picture) of some rows, which ascend. Raises `InputError` where a table cannot be read any further."""
        begin = 0
        for source in self._sources:
            end = begin + len(source.keys)
            own = [row - begin for row in rows[bisect_left(rows, begin) : bisect_left(rows, end)]]
            for row, picture in source.pictures(own) if own else ():
                yield begin + row, picture
            begin = end


def _opened(names: Sequence[Path], image_column: str, key_column: str | None) -> Iterator[Source]:
    """The sources; files that follow each other are one."""
    files: list[Path] = []
    for name in names:
        path, kind = look_at(name, ImageError, "the input")
        if kind == "nothing":
            raise ImageError(f"{path_text(path)}: no such file or folder")
        if kind != "folder" and path.suffix != ".parquet":
            files.append(path)
            continue
        if files:
            yield Files(files)
            files = []
        yield Files(pictures_below(path)) if kind == "folder" else Table(path, image_column, key_column)
    if files:
        yield Files(files)


def first_picture(index: Index) -> Any:
    """The first picture, or why there is none."""
    return next(index.pictures([0]))[1]
