"""COCO captions (Chen et al., arXiv 1504.00325), and the split file of Karpathy and Fei-Fei (arXiv 1412.2306).

The official form has `images` (id, file_name) and `annotations` (image_id, caption); Karpathy's has `images` with
filename, filepath, split and sentences. SPLIT is Karpathy's: train, restval, val, test; `train+restval` takes both.
`image_info_test2014.json` and its like are the official form without annotations: pictures that nobody described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....runtime.common.errors import OptionError
from ..reading.arguments import Arguments
from ..reading.entries import collect, fields, identifier, items, listed, text
from ..reading.files import read_json
from ..reading.places import picture
from ..reading.records import Problems, Record

USAGE = "ANNOTATIONS.json,IMAGES[,SPLIT]"
TASK = "captions"


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per picture: its first caption is the answer, all of them are references. A file of pictures alone gives
    neither.

    Raises OptionError where the file cannot be read, or has neither form.
    """
    path, folder = arguments.path(0), arguments.path(1)
    document = read_json(path)
    images = listed(document, path, "images", "COCO captions or of a Karpathy split file")
    if not _official(document, images):
        split = arguments.place(2)
        return collect(path, "images", images, _karpathy(folder, prompt, split, problems.inside), problems)
    if arguments.place(2) is not None:
        raise OptionError(f"coco: {path} has no splits; leave {arguments.place(2)!r} out")
    return load_captions(path, document, folder, prompt, problems)


def _official(document: Any, images: list[Any]) -> bool:
    """Whether images have COCO's own fields, not those of Karpathy's split file."""
    return "annotations" in document or any(isinstance(one, dict) and "file_name" in one for one in images)


def load_captions(
    path: Path,
    document: Any,
    folder: Path,
    prompt: str,
    problems: Problems,
    wanted: Callable[[dict[str, Any]], bool] = lambda entry: True,
) -> list[Record]:
    """The official form, of the images that are `wanted`; where it has no annotations, images without captions. Raises
    OptionError where its lists are none."""
    images = listed(document, path, "images", "COCO captions")
    described = "annotations" in document
    notes = listed(document, path, "annotations", "COCO captions") if described else []
    captions: dict[int | str, list[str]] = {}
    for number, entry in enumerate(notes):
        try:
            captions.setdefault(identifier(entry, "image_id"), []).append(text(entry, "caption"))
        except ValueError as error:
            problems.report(f"{path}: annotations[{number}]", str(error))

    def record(number: int, entry: Any) -> Iterator[Record]:
        name, key = text(entry, "file_name"), identifier(entry, "id")
        if not wanted(entry):
            return
        if described and key not in captions:
            raise ValueError(f"no annotation has image_id {key!r}")
        texts = tuple(captions.get(key, ()))
        yield Record(
            str(key),
            prompt,
            picture(folder / name, problems.inside),
            texts[0] if texts else None,
            references=texts,
        )

    return collect(path, "images", images, record, problems)


def _karpathy(
    folder: Path, prompt: str, split: str | None, inside: Path | None
) -> Callable[[int, Any], Iterator[Record]]:
    splits = None if split is None else split.split("+")

    def record(number: int, entry: Any) -> Iterator[Record]:
        name = text(entry, "filename")
        if splits is not None and entry.get("split") not in splits:
            return
        told = tuple(text(sentence, "raw") for sentence in items(entry, "sentences"))
        file = folder / str(fields(entry).get("filepath", "")) / name
        yield Record(name, prompt, picture(file, inside), told[0], references=told)

    return record
