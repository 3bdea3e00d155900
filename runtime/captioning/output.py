"""Captions in Parquet: a folder of shards, or one file that is made of shards beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..common.atomic_files import atomic_write
from ..common.errors import OptionError
from ..common.foreign_errors import raise_if_foreign
from ..common.locks import only_one

RUN = b"vlmexport.captions"
"""Of a file's metadata: the run that it belongs to, as JSON."""

LOCK = ".lock"
"""A file of a folder of shards while a process writes there."""


class Row(NamedTuple):
    """A line of the output: the picture's place in the input and its key, and its caption, or why there is none."""

    row: int
    key: str
    text: str | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    lossy: str | None = None
    error: str | None = None


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"captions-{number:05d}.parquet"


class Output:
    """Where captions go. `out` is one file where its name ends in `.parquet`, else a folder of shards, which is there as soon
    as the first one is.

    Args:
        run: what decides the captions, as JSON has it; every file holds it.
    """

    def __init__(self, out: Path, run: Mapping[str, Any]) -> None:
        self.out, self.run = out, json.loads(json.dumps(run))
        self._is_file = out.suffix == ".parquet" and not out.is_dir()
        self.folder = out.with_name(f".{out.name}.shards") if self._is_file else out

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Holds the output within the block.

        Raises `OptionError` where another process does, or where it holds another run.
        """
        self._check()
        self.folder.mkdir(parents=True, exist_ok=True)
        with only_one(self.folder / LOCK, self.out, kept=False):
            self._check()
            yield
        if self._is_file and self.is_complete():
            shutil.rmtree(self.folder, ignore_errors=True)

    def is_complete(self) -> bool:
        """Whether the one file is there; never of a folder."""
        return self._is_file and self.out.exists()

    def missing(self, count: int) -> list[int]:
        """Which of `count` shards are not there."""
        if self.is_complete():
            return []
        return [number for number in range(count) if not (self.folder / shard_name(number)).exists()]

    def write(self, number: int, rows: Sequence[Row]) -> None:
        """One shard, whole or not at all. Raises `OSError`."""
        from pyarrow import Table, parquet

        columns = dict(zip(Row._fields, zip(*rows, strict=True), strict=True)) if rows else {}
        table = Table.from_pydict(
            {name: columns.get(name, ()) for name in Row._fields}, schema=self._schema()
        )
        with atomic_write(self.folder / shard_name(number)) as file:
            parquet.write_table(table, file)

    def finish(self, count: int) -> None:
        """Makes the one file of its `count` shards. Raises `OSError`."""
        from pyarrow import parquet

        if not self._is_file or self.out.exists():
            return
        with atomic_write(self.out) as file, parquet.ParquetWriter(file, self._schema()) as writer:
            for number in range(count):
                writer.write_table(parquet.read_table(self.folder / shard_name(number)))

    def _schema(self) -> Any:
        import pyarrow

        text, whole = pyarrow.string(), {"row": pyarrow.int64(), "tokens": pyarrow.int32()}
        fields = [pyarrow.field(name, whole.get(name, text)) for name in Row._fields]
        return pyarrow.schema(fields, {RUN: json.dumps(self.run, ensure_ascii=False)})

    def _check(self) -> None:
        """Raises `OptionError` unless what is there belongs to this run."""
        if not self._is_file and self.out.exists() and not self.out.is_dir():
            raise OptionError(
                f"-o {self.out}: is a file; name a folder for shards, or a file that ends in .parquet"
            )
        shards = sorted(self.folder.glob(shard_name(0).replace("00000", "*")))
        for path in ([self.out] if self.is_complete() else []) + shards[:1]:
            held = _run_of(path)
            for name, value in self.run.items():
                if held.get(name) != value:
                    raise OptionError(
                        f"{path} holds captions with {name} = {held.get(name)!r:.100}, not {value!r:.100}; give another -o, or "
                        "remove it"
                    )


def _run_of(path: Path) -> dict[str, Any]:
    """The run that a file says it belongs to; {} where it says none."""
    from pyarrow import ArrowException, parquet

    try:
        held = json.loads((parquet.read_schema(path).metadata or {}).get(RUN, b"{}"))
    except (ArrowException, OSError, ValueError) as error:
        raise_if_foreign(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OptionError(f"{path} cannot be read ({reason:.200}); remove it, or give another -o") from error
    return held if isinstance(held, dict) else {}
