"""The library of published layouts: what the small files of checkpoints say, and what `vlmexport` answers to them.

A folder of `checkpoints/` is one release of one checkpoint: its JSON files with the published facts (fields, spellings,
sizes, token ids, which file holds which), templates of our own that use the same variables, branches and types of parts,
and `layout.json`, which says what the files cannot (see `Layout`). No weights: `folders.write` makes them, small and random.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

CHECKPOINTS = Path(__file__).parents[2] / "integration" / "published" / "checkpoints"
OWN = "layout.json"


@dataclass(frozen=True)
class Layout:
    """`layout.json`.

    `source`: addresses that the facts were read at, "memory" for what was read nowhere; `unread`: what no source told, and
    what was taken for it. `family`: vlmexport's. `tokens`: every token whose id a file names, as published. `tokenizer`:
    `kind` (see `vocabularies.KINDS`), `size` (published tokens, added ones included), `files` that hold it. `weights`:
    see `folders`; None where no class of transformers has them. `extends`: another folder whose files these are but for
    those here; `without`: files of it that are not. `refused`: the part of vlmexport's one line that names what it does not
    take; None where it builds. `needs`: a package that transformers reads its files with. `slow`: left to `make test-all`.
    `draft` and `target`: of a draft, its kind and the folder of the model that it drafts for; `weights` is then described
    in `drafts`.
    """

    name: str
    source: list[str]
    family: str
    tokens: dict[str, int]
    tokenizer: dict[str, Any]
    weights: dict[str, Any] | None
    extends: str | None = None
    without: list[str] = field(default_factory=list)
    refused: str | None = None
    unread: list[str] = field(default_factory=list)
    slow: bool = False
    needs: str | None = None
    draft: str | None = None
    target: str | None = None
    ranges: dict[str, list[int]] = field(default_factory=dict)
    """Added tokens that are not special, by their numbers: "<loc%04d>" → [id of the first, how many]."""

    @property
    def checkpoint(self) -> str:
        """Its id on the hub."""
        return "/".join(self.name.split("--")[:2])

    @property
    def ranged(self) -> dict[str, int]:
        """Every token of `ranges`, and its id."""
        return {
            name % number: first + number
            for name, (first, count) in self.ranges.items()
            for number in range(count)
        }

    @property
    def release(self) -> str | None:
        """Which of several forms of its files, where it has had several."""
        return next(iter(self.name.split("--")[2:]), None)

    @property
    def missing(self) -> str | None:
        """The package that it `needs`, where that is not installed."""
        return self.needs if self.needs and importlib.util.find_spec(self.needs) is None else None

    @property
    def converted(self) -> Layout:
        """The same with a tokenizer.json, which whoever lacks the package that it `needs` has to give it."""
        files = sorted({*self.tokenizer["files"], "tokenizer.json"})
        return replace(self, tokenizer=self.tokenizer | {"files": files})

    @property
    def files(self) -> dict[str, Path]:
        """Name → where it lies; of those that it extends, too."""
        found = {} if self.extends is None else read(self.extends).files
        own = CHECKPOINTS / self.name
        found |= {path.relative_to(own).as_posix(): path for path in own.rglob("*") if path.is_file()}
        return {name: path for name, path in found.items() if name not in (*self.without, OWN)}

    def json(self, name: str) -> dict[str, Any]:
        """What a file of it holds; {} without it."""
        path = self.files.get(name)
        return {} if path is None else json.loads(path.read_text("utf-8"))


def read(name: str) -> Layout:
    """The layout in the folder `name`; what it does not say is as in the one that it extends, or in a draft's target."""
    said = json.loads((CHECKPOINTS / name / OWN).read_text("utf-8"))
    inherited = {
        "extends": ("family", "tokens", "tokenizer", "weights", "slow", "ranges"),
        "target": ("family", "tokens", "tokenizer", "ranges"),
    }
    for relation, keys in inherited.items():
        if (parent := said.get(relation)) is not None:
            base = vars(read(parent))
            said = {key: base[key] for key in keys} | said
    return Layout(name=name, **said)


def layouts() -> list[Layout]:
    """All of them, by name."""
    return [read(path.parent.name) for path in sorted(CHECKPOINTS.glob(f"*/{OWN}"))]
