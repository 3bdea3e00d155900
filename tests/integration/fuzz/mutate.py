"""Mutations of bytes, JSON documents and folders, each a function of a `random.Random`: a seed gives the same again."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e-30, 1e12, 1e308, "", " ", "0", "none",
    "../../etc/passwd", "/dev/zero", "a" * 4096, "\x00", "\ud800", "‮", "{{ 1/0 }}", [], {}, [[]], [0] * 1000, {"": {}},
)  # fmt: skip
"""Values that a reader may not expect."""


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flipped bits, cut or doubled parts, filled or foreign blocks."""
    out = bytearray(data)
    size = len(out)

    def at() -> int:
        # Headers decide more than bodies: half of the places lie in the first and last hundred bytes.
        if size and rng.random() < 0.5:
            return rng.choice((rng.randrange(min(size, 100)), size - 1 - rng.randrange(min(size, 100))))
        return rng.randrange(max(size, 1))

    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        kind = rng.randrange(7)
        if not size or kind == 6:
            out[at() : at()] = rng.randbytes(rng.choice((1, 4, 64, 4096)))
        elif kind in (0, 1):
            if out:
                out[at() % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at() :]
        elif kind == 3:
            first = at()
            del out[first : first + rng.choice((1, 2, 8, 256))]
        elif kind == 4:
            first = at()
            length = rng.choice((1, 2, 4, 8))
            out[first : first + length] = rng.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * length
        else:
            first = at()
            out[first:first] = out[first : first + rng.choice((1, 16, 512))]
    return bytes(out)


def paths(document: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON document."""
    yield before
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        yield from paths(value, (*before, key))


def mutate_json(document: Any, rng: random.Random) -> Any:
    """One to three places replaced, removed, added to or exchanged."""
    out = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = [place for place in paths(out) if place]
        if not places:
            return copy.deepcopy(rng.choice(ODD))
        *way, last = rng.choice(places)
        parent = out
        for key in way:
            parent = parent[key]
        kind = rng.randrange(6)
        if kind == 0:
            del parent[last]
        elif kind == 1 and isinstance(parent[last], int | float) and not isinstance(parent[last], bool):
            parent[last] = rng.choice(
                (parent[last] + 1, parent[last] - 1, parent[last] * 2, -parent[last], 0)
            )
        elif kind == 2:
            other = rng.choice(places)
            value: Any = out
            try:
                for key in other:
                    value = value[key]
                parent[last] = copy.deepcopy(value)
            except (KeyError, IndexError, TypeError):  # an earlier step removed it
                parent[last] = None
        elif kind == 3 and isinstance(parent, dict):
            parent[rng.choice(("extra", "", "__class__", str(last).upper()))] = parent[last]
        elif kind == 4 and isinstance(parent, list):
            parent.extend([parent[last]] * rng.choice((1, 1000)))
        else:
            parent[last] = copy.deepcopy(rng.choice(ODD))  # a later change is of this case alone
    return out


def json_text(document: Any, rng: random.Random) -> bytes:
    """A document as a file, now and then not quite JSON."""
    text = json.dumps(document)
    kind = rng.randrange(12)
    if kind == 0:
        text = "[" * 100_000 + text
    elif kind == 1:
        text = text.replace(":", ": NaN,", 1)
    elif kind == 2:
        text = text[:-1] + "," + text[1:] if text else text
    elif kind == 3:
        return text.encode("utf-16")
    return text.encode("utf-8", "surrogatepass")


def mutate_json_bytes(data: bytes, rng: random.Random) -> bytes:
    """A JSON file whose document is a mutant; now and then not quite JSON."""
    return json_text(mutate_json(json.loads(data), rng), rng)


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """The JSON header of a safetensors file, its length kept true."""
    (size,) = struct.unpack("<Q", data[:8])
    text = mutate_json_bytes(data[8 : 8 + size], rng)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def mutate_model_file(path: Path, rng: random.Random) -> None:
    """As `mutate_file`, for a file of a checkpoint or a draft: mostly what its format says, else its bytes."""
    if path.suffix == ".json" and rng.random() < 0.8:
        mutate_file(path, rng, mutate_json_bytes)
    elif path.suffix == ".safetensors" and rng.random() < 0.7:
        mutate_file(path, rng, mutate_header)
    else:
        mutate_file(path, rng, mutate_bytes)


def mutate_file(path: Path, rng: random.Random, change: Callable[[bytes, random.Random], bytes]) -> None:
    """Replace a file by a mutant of it, or by something that is no file. A linked file is never written through."""
    data = path.read_bytes()
    path.unlink()
    kind = rng.randrange(30)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(rng.choice((path, path.parent, Path("/dev/zero"), Path("/nowhere"))))
    elif kind == 3:
        return  # missing
    else:
        path.write_bytes(change(data, rng))
        if kind == 4:
            path.chmod(0)


def linked_copy(source: Path, target: Path) -> Path:
    """A folder whose files are links to those of `source`: cheap, and `mutate_file` replaces what it changes."""
    for path in sorted(source.rglob("*")):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            os.link(path, to)
    return target
