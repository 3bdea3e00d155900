"""Which model a further trained one came from, as its `trained_from.json` says:

{"name": "tiny-blip2-flant5", "fingerprint": "sha256:…", "default_prompt": "describe the scene"}

`quantized_from.json` says the same of the float model whose weights became integers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ...runtime.common.atomic_files import atomic_write
from ...runtime.common.bounded_files import read_json
from ...runtime.common.errors import ExportError

FILE = "trained_from.json"
QUANTIZED = "quantized_from.json"

LARGEST = 1 << 20
"""Bytes. The description has some hundred."""
LONGEST = 1 << 16
"""Characters of a default prompt, as in a manifest."""


@dataclass(frozen=True)
class Origin:
    """The model that a changed one came from."""

    name: str
    fingerprint: str
    default_prompt: str | None = None

    @classmethod
    def read(cls, folder: Path, file: str = FILE) -> Origin | None:
        """What the model in `folder` says, None for one that says nothing. Raises ExportError for what is no such file."""
        path = folder / file
        if not path.exists():
            return None
        document = read_json(path, LARGEST, ExportError)
        values = (
            [document.get(n) for n in ("name", "fingerprint", "default_prompt")]
            if isinstance(document, dict)
            else []
        )
        for value, longest in zip(values, (200, 200, LONGEST), strict=False):
            if not isinstance(value, str | None) or len(value or "") > longest:
                raise ExportError(f"{path}: {value!r:.80} is not a text of at most {longest} characters")
        if not values or values[0] is None or values[1] is None:
            raise ExportError(f"{path} does not name a model and its fingerprint; delete it")
        return cls(*values)  # type: ignore[arg-type]

    def write(self, folder: Path, file: str = FILE) -> None:
        """Writes what `read` reads, atomically."""
        with atomic_write(folder / file) as out:
            out.write((json.dumps(asdict(self), indent=1) + "\n").encode())
