"""COCO captions (Chen et al., arXiv 1504.00325), and the split file of Karpathy and Fei-Fei (arXiv 1412.2306).

The official form has `images` (id, file_name) and `annotations` (image_id, caption); Karpathy's has `images` with
filename, filepath, split and sentences. SPLIT is Karpathy's: train, restval, val, test; `train+restval` takes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....runtime.errors import OptionError
from ..arguments import Arguments
from ..entries import collect, fields, identifier, items, listed, picture, read_json, text
from ..records import Problems, Record

USAGE = "ANNOTATIONS.json,IMAGES[,SPLIT]"
TASK = "captions"


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per picture: its first caption is the answer, all of them are references.

    Raises OptionError where the file cannot be read, or has neither form.
    """
    path, folder = arguments.path(0), arguments.path(1)
    document = read_json(path)
    images = listed(document, path, "images", "COCO captions or of a Karpathy split file")
    if "annotations" not in document:
        split = arguments.place(2)
        return collect(path, "images", images, _karpathy(folder, prompt, split), problems)
    if arguments.place(2) is not None:
        raise OptionError(f"coco: {path} has no splits; leave {arguments.place(2)!r} out")
    return load_captions(path, document, folder, prompt, problems)


def load_captions(
    path: Path,
    document: Any,
    folder: Path,
    prompt: str,
    problems: Problems,
    wanted: Callable[[dict[str, Any]], bool] = lambda entry: True,
) -> list[Record]:
    """The official form, of the images that are `wanted`. Raises OptionError where its lists are none."""
    captions: dict[int | str, list[str]] = {}
    for number, entry in enumerate(listed(document, path, "annotations", "COCO captions")):
        try:
            captions.setdefault(identifier(entry, "image_id"), []).append(text(entry, "caption"))
        except ValueError as error:
            problems.report(f"{path}: annotations[{number}]", str(error))

    def record(number: int, entry: Any) -> Iterator[Record]:
        name, key = text(entry, "file_name"), identifier(entry, "id")
        if not wanted(entry):
            return
        if key not in captions:
            raise ValueError(f"no annotation has image_id {key!r}")
        found = captions[key]
        yield Record(str(key), prompt, picture(folder / name), found[0], references=tuple(found))

    return collect(path, "images", listed(document, path, "images", "COCO captions"), record, problems)


def _karpathy(folder: Path, prompt: str, split: str | None) -> Callable[[int, Any], Iterator[Record]]:
    splits = None if split is None else split.split("+")

    def record(number: int, entry: Any) -> Iterator[Record]:
        name = text(entry, "filename")
        if splits is not None and entry.get("split") not in splits:
            return
        told = tuple(text(sentence, "raw") for sentence in items(entry, "sentences"))
        file = folder / str(fields(entry).get("filepath", "")) / name
        yield Record(name, prompt, picture(file), told[0], references=told)

    return record
