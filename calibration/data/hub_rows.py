"""Rows of a set that Hugging Face's `datasets` opens: by its hub id, or from a folder on the disk."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

from PIL import Image

from ...runtime.errors import ImageError, OptionError
from ...runtime.extras import need_extra
from ...runtime.images.load import load_image


@functools.lru_cache(maxsize=4)
def open_rows(source: str, config: str, split: str) -> Any:
    """The `datasets.Dataset` of one split, its pictures as they are stored. A folder is read as `save_to_disk` left it, or
    else as `load_dataset` reads folders (pictures with metadata, parquet, JSON, CSV). `config` may be "".

    Raises OptionError where there is no such set or split, and without the extra [data].
    """
    need_extra("data", f"--data hf:{source}")
    import datasets
    from datasets.exceptions import DatasetsError

    saved = Path(source) / "dataset_dict.json", Path(source) / "state.json"
    try:
        if any(path.is_file() for path in saved):
            found: Any = datasets.load_from_disk(source)
        else:
            found = datasets.load_dataset(source, config or None)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OptionError(f"hf:{source} cannot be opened: {reason:.200}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise OptionError(f"hf:{source} has no split {split!r:.40}; it has {', '.join(map(str, found))}")
        found = found[split]
    for name in picture_columns(found):
        found = found.cast_column(name, datasets.Image(decode=False))
    return found


def picture_columns(rows: Any) -> list[str]:
    """Names of columns that hold pictures."""
    import datasets

    return [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]


def read_picture(source: str, config: str, split: str, row: int, column: str) -> Image.Image:
    """One stored picture, RGB. Raises ImageError for a damaged one."""
    stored = open_rows(source, config, split)[row][column]
    name = f"row {row} of hf:{source}"
    if not isinstance(stored, dict) or not (stored.get("bytes") or stored.get("path")):
        raise ImageError(f"{name}: no picture in {column!r}")
    return load_image(io.BytesIO(stored["bytes"]) if stored.get("bytes") else stored["path"], name=name)
