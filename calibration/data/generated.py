"""Reading what `vlmexport generate-data` wrote: a target's own answers, in shards."""

from __future__ import annotations

from pathlib import Path

from ...runtime.common.bounded_files import read_json
from ...runtime.common.errors import OptionError
from .reading.lines import checked_text, json_lines
from .reading.places import check_reference, is_file
from .reading.records import ImageRef, Problems, Record

META = "generated.json"
WHOLE, PLACE = "whole", "place"
"""What only a part has: in its description the numbers of `records` and `shards` of the whole, and in a line the place of
its record in the whole."""
META_LIMIT = 16 << 20
"""Bytes. A description has about a kilobyte."""


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.jsonl"


def load_generated(folder: Path, problems: Problems) -> tuple[list[Record], dict[str, str]]:
    """(records with tokens, the target that wrote them).

    Raises:
        OptionError: the generation was interrupted (a shard is missing), or the description is unreadable.
    """
    meta = read_meta(folder)
    try:
        target = {"name": str(meta["target"]["name"]), "fingerprint": str(meta["target"]["fingerprint"])}
        shards = int(meta["shards"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise OptionError(f"{folder / META} cannot be read: {error!r}") from error
    records = []
    for number in range(shards):
        path = folder / shard_name(number)
        if not is_file(path):
            raise OptionError(
                f"{folder} misses {path.name}: run the same vlmexport generate-data again to finish it"
            )
        for line_number, value in json_lines(path, problems):
            try:
                records.append(_record(value, problems.inside))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.report(f"{path}:{line_number}", repr(error))
    return records, target


def read_meta(folder: Path) -> dict:
    """What the folder's description says. Raises OptionError where there is none that can be read."""
    path = folder / META
    meta = read_json(path, META_LIMIT, OptionError)
    if not isinstance(meta, dict):
        raise OptionError(f"{path} cannot be read: it holds {type(meta).__name__}, not an object")
    return meta


def _record(value: dict, inside: Path | None) -> Record:
    tokens = value["tokens"]
    if not isinstance(tokens, list) or not all(type(t) is int and t >= 0 for t in tokens):
        raise ValueError(f"tokens {tokens!r:.80} are not a list of ids")
    image = ImageRef.from_json(value["image"]) if value.get("image") else None
    if image is not None:
        check_reference(image, inside)
    prompt = checked_text("prompt", str(value["prompt"]))
    history = tuple(_turn(turn) for turn in value.get("history") or ())
    return Record(str(value["key"]), prompt, image, value.get("text"), tuple(tokens), history)


def _turn(turn: object) -> tuple[str, str]:
    if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)):
        raise ValueError(f"history {turn!r:.80} is not a list of [role, text]")
    return turn[0], checked_text("history", turn[1])
