"""VisDial 1.0 (Das et al., arXiv 1611.08669): ten rounds of questions about a picture, 100 candidate answers each.

`visdial_1.0_val.json` has `split` (train, val2018, test2018) and `data` with `questions`, `answers` (texts) and `dialogs`
(image_id, caption, dialog of question, answer, answer_options and gt_index, which are places in those lists). Pictures:
`VisualDialog_val2018_000000000042.jpg`; of train COCO's of 2014, in `IMAGES/train2014` and `IMAGES/val2014` or in IMAGES.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....runtime.common.errors import OptionError
from ..reading.arguments import Arguments
from ..reading.entries import collect, fields, identifier, items, listed, number_below, text
from ..reading.files import read_json
from ..reading.places import is_file, picture
from ..reading.records import ImageRef, Problems, Record
from .vqav2 import coco_picture

USAGE = "DIALOGS.json,IMAGES"
TASK = "choices"
INTRODUCTION = "Describe the picture."
"""The question that the caption answers, which every dialog begins with."""


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per round, behind the caption and the rounds before it. A round without an answer (those of `test`
    but the last) only tells what was asked. Raises OptionError for a file of another layout."""
    path, folder = arguments.path(0), arguments.path(1)
    document = read_json(path)
    pools = [listed(document, path, f"data.{name}", "VisDial") for name in ("questions", "answers")]
    dialogs, split = listed(document, path, "data.dialogs", "VisDial"), document.get("split")
    if not isinstance(split, str):
        raise OptionError(f"{path} has no 'split': not the layout of VisDial 1.0")

    def record(number: int, entry: Any) -> Iterator[Record]:
        image = identifier(entry, "image_id")
        image_ref, history = (
            _picture(folder, split, image, problems.inside),
            [("user", INTRODUCTION), ("assistant", text(entry, "caption"))],
        )
        made = []
        for place, one in enumerate(items(entry, "dialog"), 1):
            question = _pooled(pools[0], one, "question")
            answered = fields(one).get("answer") is not None
            answer = _pooled(pools[1], one, "answer") if answered else None
            if one.get("answer_options") is not None:
                options = items(one, "answer_options")
                choices = tuple(_pooled(pools[1], {"answer_options": o}, "answer_options") for o in options)
                right = None if one.get("gt_index") is None else number_below(one, "gt_index", len(choices))
                made.append(
                    Record(
                        f"{image}-{place}", question, image_ref, answer, history=tuple(history),
                        references=(answer,) if answer else (), choices=choices, choice=right,
                    )
                )  # fmt: skip
            elif answer is not None:
                references = (answer,)
                made.append(
                    Record(
                        f"{image}-{place}",
                        question,
                        image_ref,
                        answer,
                        history=tuple(history),
                        references=references,
                    )
                )
            if answer is not None:
                history += [("user", question), ("assistant", answer)]
        yield from made

    return collect(path, "data.dialogs", dialogs, record, problems)


def _pooled(pool: list[Any], entry: Any, name: str) -> str:
    """The text of `pool` that the field `name` gives the place of."""
    return text({name: pool[number_below(entry, name, len(pool))]}, name)


def _picture(folder: Path, split: str, image: int | str, inside: Path | None) -> ImageRef:
    number = f"{int(image):012d}" if str(image).isdecimal() else str(image)
    own = folder / f"VisualDialog_{split}_{number}.jpg"
    candidates = [own, *(coco_picture(folder, name, image, inside) for name in ("train2014", "val2014"))]
    return picture(next((path for path in candidates if is_file(path, inside)), own), inside)
