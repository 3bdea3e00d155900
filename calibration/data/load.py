"""From `--data D` to records.

| D | records |
|---|---|
| `scenes:SPLIT[:COUNT]` | generated tabletop scenes (train, validation or heldout) with their captions |
| `scenes-questions:SPLIT[:COUNT]` | the same scenes, one question with its answer each |
| `coco:JSON,IMAGES[,SPLIT]` | COCO captions (`images` + `annotations`), or a Karpathy split file |
| `images:FOLDER` | every image of a folder, without text (for generate-data) |
| `FILE.jsonl` | one object a line: `prompt`, and optionally `image` (relative to the file), `answer` |
| `FOLDER` | what `vlmexport generate-data` wrote |
"""

from __future__ import annotations

from pathlib import Path

from ...runtime.errors import OptionError
from .coco import load_coco
from .generated import load_generated
from .jsonl import load_jsonl
from .records import ImageRef, Problems, Record, RecordSet, image_problem
from .scenes import load_scenes

_FORMS = "scenes:SPLIT[:COUNT], scenes-questions:SPLIT[:COUNT], coco:JSON,IMAGES[,SPLIT], images:FOLDER, FILE.jsonl, or a folder written by generate-data"
_IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"}


def load_records(data: str, strict: bool = False, prompt: str = "", limit: int | None = None) -> RecordSet:
    """Reads `data` (module docstring). Bad records are printed and counted, or raised at once when `strict`.

    Args:
        data: what to read.
        prompt: the prompt of records that carry none of their own (coco, images).
        limit: keep the first so many.

    Raises:
        OptionError: `data` has no known form, or names nothing. InputError: a bad record, when strict.
    """
    problems = Problems(strict)
    head, _, rest = data.partition(":")
    generated_by = None
    if head in ("scenes", "scenes-questions"):
        records = load_scenes(rest, ask=head == "scenes-questions")
    elif head == "coco":
        records = load_coco(rest, prompt, problems)
    elif head == "images":
        records = _image_folder(Path(rest), prompt, problems)
    elif data.endswith(".jsonl") and Path(data).is_file():
        records = load_jsonl(Path(data), prompt, problems)
    elif (Path(data) / "generated.json").is_file():
        records, generated_by = load_generated(Path(data), problems)
    else:
        raise OptionError(f"--data {data!r} names no data; give {_FORMS}")
    if limit is not None:
        records = records[:limit]
    if not records:
        raise OptionError(f"--data {data!r} has no usable record ({len(problems.found)} were bad)")
    return RecordSet(data, records, problems.found, generated_by)


def _image_folder(folder: Path, prompt: str, problems: Problems) -> list[Record]:
    if not folder.is_dir():
        raise OptionError(f"--data images:{folder}: no such folder")
    records = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in _IMAGES):
        wrong = image_problem(path)
        if wrong:
            problems.report(str(path), wrong)
            continue
        records.append(Record(str(path.relative_to(folder)), prompt, ImageRef(file=str(path))))
    return records
