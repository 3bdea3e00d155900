"""VQA v2 (Goyal et al., arXiv 1612.00837): questions and, of train and val, ten people's answers to each.

`v2_OpenEnded_mscoco_val2014_questions.json` has `questions` (question_id, image_id, question) and `data_subtype`;
`v2_mscoco_val2014_annotations.json` has `annotations` (question_id, multiple_choice_answer, answers of answer, …).
Pictures are named as COCO's of 2014, `COCO_val2014_000000000042.jpg`, in the folder or in one of the subtype's name;
those of `test-dev2015` as those of `test2015`.
OK-VQA's files have the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....runtime.common.errors import OptionError
from ..reading.arguments import Arguments
from ..reading.entries import collect, fields, identifier, items, listed, text
from ..reading.files import read_json
from ..reading.places import is_file, picture
from ..reading.records import Problems, Record

USAGE = "QUESTIONS.json,IMAGES[,ANNOTATIONS.json]"
TASK = "vqa"


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question; its answer is the most frequent one, its references are all ten. Without ANNOTATIONS it
    has neither. Raises OptionError for files of another layout."""
    path, folder, notes = arguments.path(0), arguments.path(1), arguments.place(2)
    document = read_json(path)
    questions = listed(document, path, "questions", "VQA v2")
    subtype = document.get("data_subtype")
    if not isinstance(subtype, str) or not subtype:
        raise OptionError(
            f"{path} has no 'data_subtype' (train2014, val2014, test2015): not the layout of VQA v2"
        )
    answers = {} if notes is None else _answers(Path(notes), problems)

    def record(number: int, entry: Any) -> Iterator[Record]:
        key, image = identifier(entry, "question_id"), identifier(entry, "image_id")
        question = text(entry, "question")
        if notes is not None and key not in answers:
            raise ValueError(f"{notes} has no annotation of question_id {key!r}")
        common, told = answers.get(key, (None, ()))
        image_ref = picture(coco_picture(folder, subtype, image, problems.inside), problems.inside)
        yield Record(str(key), question, image_ref, common, references=told)

    return collect(path, "questions", questions, record, problems)


def coco_picture(folder: Path, subtype: str, image: int | str, inside: Path | None) -> Path:
    """Where COCO keeps a picture: in `folder`, or in the folder of its subtype there. Those of the questions of
    `test-dev2015` are some of `test2015`."""
    subtype = subtype.replace("-dev", "")
    name = f"COCO_{subtype}_{int(image):012d}.jpg" if str(image).isdecimal() else str(image)
    inner = folder / subtype / name
    return inner if is_file(inner, inside) else folder / name


def _answers(path: Path, problems: Problems) -> dict[int | str, tuple[str | None, tuple[str, ...]]]:
    """(most frequent answer, None where it is blank; all answers) by question."""
    answers = {}
    for number, entry in enumerate(listed(read_json(path), path, "annotations", "VQA v2's annotations")):
        try:
            told = tuple(_said(one, "answer") for one in items(entry, "answers"))
            common = _said(entry, "multiple_choice_answer") or None
            answers[identifier(entry, "question_id")] = common, told
        except ValueError as error:
            problems.report(f"{path}: annotations[{number}]", str(error))
    return answers


def _said(entry: Any, name: str) -> str:
    """What one of the ten said, or most of them. Nothing is an answer, too: the official score counts it beside the other
    nine."""
    said = fields(entry).get(name)
    return "" if isinstance(said, str) and not said.strip() else text(entry, name)
