"""COCO caption files: the official form and Karpathy's split file."""

from __future__ import annotations

import json
from pathlib import Path

from ...runtime.errors import OptionError
from .records import ImageRef, Problems, Record, image_problem


def load_coco(text: str, prompt: str, problems: Problems) -> list[Record]:
    """`JSON,IMAGES[,SPLIT]` to one record per picture, with its first caption.

    The official form has `images` (id, file_name) and `annotations` (image_id, caption); Karpathy's has
    `images` with filename, filepath, split and sentences. SPLIT selects by Karpathy's `split`.

    Raises:
        OptionError: the text has another form, the file cannot be read, or has neither form.
    """
    parts = text.split(",")
    if len(parts) not in (2, 3):
        raise OptionError(f"coco:{text}: give coco:ANNOTATIONS.json,IMAGE_FOLDER[,SPLIT]")
    path, folder = Path(parts[0]), Path(parts[1])
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not JSON: {error}") from error
    images = document.get("images") if isinstance(document, dict) else None
    if not isinstance(images, list):
        raise OptionError(f"{path} has no list 'images': neither COCO captions nor a Karpathy split file")
    if "annotations" in document:
        if not isinstance(document["annotations"], list):
            raise OptionError(f"{path}: 'annotations' is not a list; give COCO captions")
        return _official(path, images, document["annotations"], folder, prompt, problems)
    return _karpathy(path, images, folder, prompt, parts[2] if len(parts) == 3 else None, problems)


def _official(
    path: Path, images: list, annotations: list, folder: Path, prompt: str, problems: Problems
) -> list[Record]:
    captions: dict[object, str] = {}
    for number, entry in enumerate(annotations):
        text = entry.get("caption") if _named(entry, "image_id") else None
        if not isinstance(text, str) or not text.strip():
            problems.report(f"{path}: annotations[{number}]", "no caption of an image")
            continue
        captions.setdefault(entry.get("image_id"), text.strip())
    records = []
    for number, entry in enumerate(images):
        where = f"{path}: images[{number}]"
        name = entry.get("file_name") if _named(entry, "id") else None
        if not isinstance(name, str):
            problems.report(where, "no file_name, or no id")
        elif entry.get("id") not in captions:
            problems.report(where, f"no annotation has image_id {entry.get('id')!r}")
        elif wrong := image_problem(folder / name):
            problems.report(where, wrong)
        else:
            records.append(
                Record(str(entry["id"]), prompt, ImageRef(file=str(folder / name)), captions[entry["id"]])
            )
    return records


def _named(entry: object, name: str) -> bool:
    """Whether `entry` is an object whose field `name` can be looked up: a number or a text."""
    return isinstance(entry, dict) and isinstance(entry.get(name), int | str)


def _karpathy(
    path: Path, images: list, folder: Path, prompt: str, split: str | None, problems: Problems
) -> list[Record]:
    records = []
    for number, entry in enumerate(images):
        where = f"{path}: images[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("filename"), str):
            problems.report(where, "no filename")
            continue
        if split is not None and entry.get("split") != split:
            continue
        sentences = entry.get("sentences")
        found = sentences[0] if isinstance(sentences, list) and sentences else None
        first = found.get("raw") if isinstance(found, dict) else None
        file = folder / str(entry.get("filepath", "")) / entry["filename"]
        if not isinstance(first, str) or not first.strip():
            problems.report(where, "no sentences[0].raw")
        elif wrong := image_problem(file):
            problems.report(where, wrong)
        else:
            records.append(Record(entry["filename"], prompt, ImageRef(file=str(file)), first.strip()))
    return records
