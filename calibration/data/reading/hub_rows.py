"""Rows of a set that Hugging Face's `datasets` opens: by its hub id, or from a folder on the disk."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ....runtime.common.errors import ImageError, OptionError
from ....runtime.common.optional_deps import need_extra
from ....runtime.common.paths import is_file
from ....runtime.images.load import load_image


@dataclass(frozen=True)
class Rows:
    """A split: the columns that hold no pictures, and those that do, or lists of them, as they are stored. (`datasets`
    decodes what it hands out; told not to, it copies a column of lists.)"""

    names: list[str]
    count: int
    texts: Any  # a datasets.Dataset
    pictures: Mapping[str, Any]  # a datasets.Dataset of one column each, of Arrow tables

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each row, without its pictures."""
        return iter(self.texts) if self.texts.column_names else ({} for _ in range(self.count))

    def picture(self, row: int, column: str) -> dict[str, Any] | None:
        """`bytes` or `path` of a row's picture, of a list the only one; None where there is none. ValueError for several."""
        stored = self.pictures[column][row].column(0).to_pylist()[0]
        pictures = [one for one in (stored if isinstance(stored, list) else [stored]) if one]
        if len(pictures) > 1:
            raise ValueError(f"column {column!r} holds {len(pictures)} pictures, and a record has one")
        return pictures[0] if pictures else None


@functools.lru_cache(maxsize=4)
def open_rows(source: str, config: str, split: str) -> Rows:
    """The rows of one split. A folder is read as `save_to_disk` left it, or else as `load_dataset` reads folders (pictures
    with metadata, parquet, JSON, CSV). `config` may be ""; `split` is a name, or what `datasets` makes of names:
    `validation[:100]`, `train+test`.

    Raises OptionError where there is no such set or split, and without the extra [data].
    """
    need_extra("data", f"--data hf:{source}")
    import datasets
    from datasets.exceptions import DatasetsError

    saved = Path(source) / "dataset_dict.json", Path(source) / "state.json"
    try:
        opened = _saved if any(map(is_file, saved)) else _published
        dataset = opened(source, config, split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OptionError(f"hf:{source} cannot be opened: {reason:.200}") from error
    pictures = [
        name
        for name, feature in dataset.features.items()
        if isinstance(getattr(feature, "feature", feature), datasets.Image)
    ]
    return Rows(
        dataset.column_names, len(dataset), dataset.remove_columns(pictures),
        {name: dataset.select_columns([name]).with_format("arrow") for name in pictures},
    )  # fmt: skip


def _saved(source: str, config: str, split: str) -> Any:
    """Of what `save_to_disk` wrote: several splits, or one, which then has whatever name it is asked for."""
    import datasets

    dataset: Any = datasets.load_from_disk(source)
    parts = dataset if isinstance(dataset, datasets.DatasetDict) else {_split_names(split)[0]: dataset}
    _check_splits(source, split, parts)
    wanted = datasets.ReadInstruction.from_spec(split).to_absolute(
        {name: len(p) for name, p in parts.items()}
    )
    return datasets.concatenate_datasets([parts[w.splitname].select(range(w.from_, w.to)) for w in wanted])


def _published(source: str, config: str, split: str) -> Any:
    """Of a set on the hub or a folder. `load_dataset` downloads and prepares all splits whatever it is asked for, so it is
    given the files of these alone; what it expected of the others is then not checked."""
    import datasets

    whole = datasets.load_dataset_builder(source, config or None)
    files = whole.config.data_files
    if not files:  # made by a script
        return datasets.load_dataset(source, config or None, split=split)
    _check_splits(source, split, files)
    return datasets.load_dataset(
        source, config or None, split=split, features=whole.info.features, verification_mode="no_checks",
        data_files={name: [str(file) for file in files[name]] for name in _split_names(split)},
    )  # fmt: skip


def _split_names(split: str) -> list[str]:
    """`validation` and `test` of `validation[:10%]+test`."""
    return list(dict.fromkeys(part.partition("[")[0].strip() for part in split.split("+")))


def _check_splits(source: str, split: str, parts: Iterable[object]) -> None:
    """OptionError where a name of `split` is none of `parts`."""
    known = [str(part) for part in parts]
    for name in _split_names(split):
        if name not in known:
            raise OptionError(f"hf:{source} has no split {name!r:.40}; it has {', '.join(known)}")


def read_picture(source: str, config: str, split: str, row: int, column: str) -> Image.Image:
    """One stored picture, RGB. Raises ImageError for a damaged one."""
    stored = open_rows(source, config, split).picture(row, column)
    name = f"row {row} of hf:{source}"
    if stored is None or not (stored.get("bytes") or stored.get("path")):
        raise ImageError(f"{name}: no picture in {column!r}")
    return load_image(io.BytesIO(stored["bytes"]) if stored.get("bytes") else stored["path"], name=name)
