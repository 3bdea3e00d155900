"""`vlmexport generate-data --join`: the folders of all parts become the one that a run without parts writes."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...exporter.common.write_errors import explain_write_errors
from ...exporter.output import whole_folder
from ...exporter.output.folder import refuse_existing
from ...runtime.common.bounded_files import opened, parse_json
from ...runtime.common.errors import OptionError
from ...runtime.common.parts import Part, read_part
from ..common.provenance import provenance
from ..data.generated import META, PLACE, WHOLE, read_meta, shard_name
from ..data.reading.places import is_file

OWN = ("part", "shards", "provenance")
"""Of a description: what parts of one run do not share."""


class _Folder(NamedTuple):
    path: Path
    part: Part
    shards: int
    run: dict[str, Any]
    """What all parts of one run have in common, in the order of the description."""


class _Line(NamedTuple):
    place: int
    text: str


def join_parts(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes what `generate_data` writes without parts: the same shards, and the same description but for its provenance.
    Returns what `--json` prints.

    Args:
        folders: of all parts, in any order. out: a new or empty folder, or one that holds the same data.

    Raises:
        OptionError: a folder holds no part, or an unfinished or damaged one; parts of different runs; a part that is missing or
        given twice; `out` holds something else.
    """
    found = sorted((_opened(folder) for folder in folders), key=lambda folder: folder.part.number)
    _check_whole(found)
    run = dict(found[0].run)
    whole = run.pop(WHOLE)
    # In the order of a run without parts, where these two stand last.
    run |= {"part": None, "shards": whole["shards"]}
    _check_output(out, run)
    lines = heapq.merge(*map(_lines, found), key=lambda line: line.place)
    with explain_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as folder:
            answers = _write_shards(folder, lines, run["shard_size"], whole["shards"])
            made = provenance() | {"parts": [str(one.path) for one in found]}
            (folder / META).write_text(json.dumps(run | {"provenance": made}, indent=1) + "\n", "utf-8")
    return {
        "schema_version": 1,
        "status": "joined",
        "target": run["target"],
        "engine": run["engine"],
        "output": str(out),
        "parts": len(found),
        "records": whole["records"],
        "shards": whole["shards"],
        "answers": answers,
    }


def _write_shards(folder: Path, lines: Iterable[_Line], size: int, count: int) -> int:
    """Writes `count` shards of `size` records each, also where none of a shard's was answered; returns the number of
    lines."""
    for number in range(count):
        (folder / shard_name(number)).touch()
    written = 0
    for number, group in groupby(lines, key=lambda line: line.place // size):
        with (folder / shard_name(number)).open("w", encoding="utf-8", newline="\n") as file:
            for line in group:
                file.write(line.text)
                written += 1
    return written


def _opened(folder: Path) -> _Folder:
    """A folder's description. Raises OptionError where it is of no part, or a shard is missing."""
    meta = read_meta(folder)
    if meta.get("part") is None:
        raise OptionError(f"{folder} holds no part: it was written without --part")
    try:
        part = read_part("part", meta["part"])
        whole = {name: int(meta[WHOLE][name]) for name in ("records", "shards")}
        shards, size = int(meta["shards"]), int(meta["shard_size"])
        if not (shards >= 0 and size > 0 and whole["shards"] == -(-whole["records"] // size)):
            raise ValueError("its numbers of shards contradict each other")
    except (ValueError, KeyError, TypeError, OverflowError, OptionError) as error:
        raise OptionError(f"{folder / META} cannot be read: {error!r:.200}") from error
    for number in range(shards):
        if not is_file(folder / shard_name(number)):
            raise OptionError(
                f"{folder} (part {part}) is not finished: it misses {shard_name(number)}; run its command again"
            )
    return _Folder(folder, part, shards, {name: value for name, value in meta.items() if name not in OWN})


def _check_whole(found: Sequence[_Folder]) -> None:
    """Raises OptionError unless these are all parts of one run, each once."""
    first = found[0]
    for other in found[1:]:
        for name in [*first.run, *(name for name in other.run if name not in first.run)]:
            here, there = first.run.get(name), other.run.get(name)
            if here != there:
                raise OptionError(
                    f"{first.path} holds a part of a run with {name} = {here!r:.200}, {other.path} one with {there!r:.200}: "
                    "give the parts of one run"
                )
    for one, other in pairwise(found):
        if one.part.count != other.part.count:
            raise OptionError(
                f"{one.path} is part {one.part} and {other.path} is part {other.part}: give the parts of one run"
            )
        if one.part == other.part:
            raise OptionError(f"{one.path} and {other.path} are both part {one.part}: give one of them")
    there = {one.part.number for one in found}
    missing = [str(Part(n, first.part.count)) for n in range(first.part.count) if n not in there]
    if missing:
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise OptionError(f"part {named} is missing: give the folders of all {first.part.count} parts")


def _check_output(out: Path, run: dict[str, Any]) -> None:
    """Raises OptionError for a folder that holds anything but the same data, which an earlier join wrote."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if is_file(out / META):
        held = read_meta(out)
        if all(held.get(name) == value for name, value in run.items()):
            return
    refuse_existing(out, "choose another -o")


def _lines(folder: _Folder) -> Iterator[_Line]:
    """The lines of a part as a run without parts writes them, in the order of their places. Raises OptionError."""
    last = 0
    for number in range(folder.shards):
        path = folder.path / shard_name(number)
        with opened(path, OptionError) as file:
            for line_number, line in enumerate(file, 1):
                try:
                    value = parse_json(line)
                    place = value.pop(PLACE)
                except (ValueError, LookupError, AttributeError, TypeError) as error:
                    raise _changed(path, line_number, repr(error)) from error
                if type(place) is not int or not last <= place < folder.run[WHOLE]["records"]:
                    raise _changed(path, line_number, f"the place {place!r:.40} does not follow {last}")
                last = place
                yield _Line(place, json.dumps(value) + "\n")


def _changed(path: Path, line: int, reason: str) -> OptionError:
    return OptionError(
        f"{path}:{line}: {reason:.200}; the file was changed: remove it, and run the part's command again"
    )
