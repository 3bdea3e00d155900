"""Draft folders on disk: `draft.json`, which says what the draft is, and `draft.safetensors`.

    {"format": "vlmexport-draft", "schema_version": 1, "kind": "imitation", "layer": 3,
     "network": {…options of the kind's network…},
     "target": {"name": "tiny-blip2-flant5", "fingerprint": "sha256:…", "num_layers": 12},
     "provenance": {…}, "evaluation": {…}}

`layer` is null for kinds that need none. Where the target changed while the draft was trained, `target` is the changed
one, which lies in the folder `model` beside the two files, and has `trained_from`: name and fingerprint of what it was.
A folder may come from anyone: nothing in it is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....runtime.common.atomic_files import atomic_write
from ....runtime.common.bounded_files import read_json
from ....runtime.common.errors import ExportError
from ....runtime.common.foreign_errors import raise_if_foreign
from ...common.one_line import first_line

if TYPE_CHECKING:
    import torch

FORMAT = "vlmexport-draft"
SCHEMA_VERSION = 1
DESCRIPTION, TENSORS = "draft.json", "draft.safetensors"
MODEL = "model"
DESCRIPTION_LIMIT = 16 << 20
"""Bytes. A description with its evaluation has some kilobytes."""


def draft_name(kind: str, layer: int | None) -> str:
    """Name of a draft in a manifest."""
    return kind if layer is None else f"{kind}@{layer}"


def draft_folder(folder: Path) -> Path:
    """`folder`, or the best draft's one where `folder` is that of a training run."""
    best = folder / "best"
    return best if not (folder / DESCRIPTION).exists() and (best / DESCRIPTION).exists() else folder


def read_document(folder: Path) -> Mapping[str, Any]:
    """`draft.json`, checked for format and the fields that every kind has; raises ExportError with one line."""
    path = folder / DESCRIPTION
    if not path.exists():
        raise ExportError(f"{folder} is not a draft folder: {path} cannot be read (it does not exist)")
    document = read_json(path, DESCRIPTION_LIMIT, ExportError)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ExportError(f"{path} does not say format {FORMAT!r}; give a folder written by vlmexport train")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ExportError(
            f"{path} has schema version {document.get('schema_version')!r:.80}; this version reads {SCHEMA_VERSION}"
        )
    if "layer" not in document:
        raise ExportError(f"{path}: field 'layer' is missing")
    for name, kinds in (
        ("kind", (str,)),
        ("layer", (int, type(None))),
        ("network", (dict,)),
        ("target", (dict,)),
        ("provenance", (dict, type(None))),
        ("evaluation", (dict, type(None))),
    ):
        value = document.get(name)
        if type(value) not in kinds:
            raise ExportError(f"{path}: field {name!r} is {value!r:.80}, not of type {kinds[0].__name__}")
    return document


def write_document(folder: Path, document: Mapping[str, Any]) -> None:
    """Replaces `draft.json` atomically; call it after the tensors are written."""
    text = json.dumps({"format": FORMAT, "schema_version": SCHEMA_VERSION, **document}, indent=1) + "\n"
    with atomic_write(folder / DESCRIPTION) as out:
        out.write(text.encode())


def read_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tensors, which must have exactly these names and shapes, as they are.

    Only the header is read before they are compared. Raises ExportError with one line.
    """
    from safetensors import safe_open

    path = folder / TENSORS
    if path.exists() and not path.is_file():
        raise ExportError(f"{path} is not a regular file")
    try:
        with safe_open(path, framework="pt") as file:
            file_shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            for name in sorted(file_shapes.keys() ^ shapes.keys()):
                what = "holds an unknown tensor" if name in file_shapes else "misses the tensor"
                raise ExportError(f"the draft {folder} cannot be read: {path.name} {what} {name!r:.80}")
            for name, shape in shapes.items():
                if file_shapes[name] != shape:
                    raise ExportError(
                        f"the draft {folder} cannot be read: {name} has shape {list(file_shapes[name])}, "
                        f"{DESCRIPTION} implies {list(shape)}"
                    )
            return {name: file.get_tensor(name) for name in shapes}
    except Exception as error:
        raise_if_foreign(error)
        if isinstance(error, ExportError):
            raise
        raise ExportError(f"the draft {folder} cannot be read: {first_line(error)}") from error


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Replaces `draft.safetensors` atomically; `dtype` is that of numbers, integers stay."""
    from safetensors.torch import save

    stored = {
        k: v.detach().to("cpu", dtype if v.is_floating_point() else v.dtype).contiguous()
        for k, v in tensors.items()
    }
    with atomic_write(folder / TENSORS) as out:
        out.write(save(stored))  # save_file would make it unreadable to others
