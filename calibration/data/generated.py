"""Reading what `vlmexport generate-data` wrote: a target's own answers, in shards."""

from __future__ import annotations

import json
from pathlib import Path

from ...runtime.errors import OptionError
from .records import ImageRef, Problems, Record

META = "generated.json"


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.jsonl"


def load_generated(folder: Path, problems: Problems) -> tuple[list[Record], dict[str, str]]:
    """(records with tokens, the target that wrote them).

    Raises:
        OptionError: the generation was interrupted (a shard is missing), or the description is unreadable.
    """
    try:
        meta = json.loads((folder / META).read_text("utf-8"))
        target = {"name": str(meta["target"]["name"]), "fingerprint": str(meta["target"]["fingerprint"])}
        shards = int(meta["shards"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{folder / META} cannot be read: {error!r}") from error
    records = []
    for number in range(shards):
        path = folder / shard_name(number)
        if not path.is_file():
            raise OptionError(
                f"{folder} misses {path.name}: run the same vlmexport generate-data again to finish it"
            )
        for line_number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                records.append(_record(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.report(f"{path}:{line_number}", repr(error))
    return records, target


def _record(value: dict) -> Record:
    tokens = value["tokens"]
    if not isinstance(tokens, list) or not all(isinstance(t, int) and t >= 0 for t in tokens):
        raise ValueError(f"tokens {tokens!r} are not a list of ids")
    image = ImageRef.from_json(value["image"]) if value.get("image") else None
    return Record(str(value["key"]), str(value["prompt"]), image, value.get("text"), tuple(tokens))
