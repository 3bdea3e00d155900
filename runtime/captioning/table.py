"""Pictures in a Parquet table: paths, encoded bytes, or both as Hugging Face's `datasets` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common.errors import ImageError, InputError, OptionError
from ..common.foreign_errors import raise_if_foreign

BATCH = 32
"""Rows that are read at once: encoded pictures may take megabytes each."""


class Table:
    """A `Source` of the rows of a table. The image column holds paths (relative to the table's folder), encoded pictures
    (binary), or structs of `bytes` and `path`, of which the bytes are taken where there are any.

    Raises:
        OptionError: there is no such column, or it has another type. InputError: the file cannot be read.
    """

    def __init__(self, path: Path, image_column: str, key_column: str | None) -> None:
        from pyarrow import parquet

        self._path, self._column = path, image_column
        with _told(path):
            self._file = parquet.ParquetFile(path)
            schema = self._file.schema_arrow
        for option, name in (("--image-column", image_column), ("--key-column", key_column)):
            if name is not None and name not in schema.names:
                raise OptionError(
                    f"{option} {name!r:.80}: {path} has the columns {', '.join(schema.names):.200}; name one of them"
                )
        self._kind = _kind(schema.field(image_column).type)
        if self._kind is None:
            raise OptionError(
                f"--image-column {image_column!r:.80}: {path} holds {schema.field(image_column).type!s:.80} there; name a column "
                "of paths, of bytes, or of structs of both"
            )
        self.keys: Sequence[str] = self._keys(key_column)

    def pictures(self, rows: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """See `Source`. Raises `InputError` where the file cannot be read any further."""
        wanted, begin = set(rows), 0
        for group in range(self._file.num_row_groups):
            end = begin + self._file.metadata.row_group(group).num_rows
            if any(row in wanted for row in range(begin, end)):
                for row, cell in enumerate(self._cells(self._column, [group]), begin):
                    if row in wanted:
                        yield row, self._picture(row, cell)
            begin = end

    def _keys(self, column: str | None) -> list[str]:
        if column is not None:
            cells: Iterator[Any] = self._cells(column)
        elif self._kind == "struct":
            cells = (
                cell and cell.get("path") for cell in self._cells(f"{self._column}.path", name=self._column)
            )
        elif self._kind == "path":
            cells = self._cells(self._column)
        else:
            cells = iter([None] * self._file.metadata.num_rows)
        return [f"{self._path}#{row}" if cell is None else str(cell) for row, cell in enumerate(cells)]

    def _cells(self, column: str, groups: list[int] | None = None, name: str | None = None) -> Iterator[Any]:
        """The values of a column, or of a part of one that `name` has."""
        with _told(self._path):
            for batch in self._file.iter_batches(BATCH, row_groups=groups, columns=[column]):
                yield from batch.column(name or column).to_pylist()

    def _picture(self, row: int, cell: Any) -> Any:
        path = cell
        if self._kind == "struct" and cell is not None:
            path = cell.get("path")
            if cell.get("bytes") is not None:
                return cell["bytes"]
        if path is None:
            return ImageError(f"{self._path}#{row}: the table has no picture in this row")
        return path if isinstance(path, bytes) else self._path.parent / path


def _kind(kind: Any) -> str | None:
    """ "path", "bytes" or "struct"; None for a type that holds no pictures."""
    from pyarrow import types

    if types.is_string(kind) or types.is_large_string(kind):
        return "path"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    if types.is_struct(kind):
        inner = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        if _kind(inner.get("bytes")) == "bytes" and _kind(inner.get("path")) == "path":
            return "struct"
    return None


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns what pyarrow says of a file into one line."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise_if_foreign(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path}: cannot be read as a Parquet table ({reason:.200})") from error
