"""MME (Fu et al., arXiv 2306.13394): a folder per category, a text file beside every picture.

`FOLDER/CATEGORY/NAME.txt`, or `FOLDER/CATEGORY/questions_answers_YN/NAME.txt` with the pictures in
`FOLDER/CATEGORY/images`. A line is a question, a tab, and Yes or No; every picture has two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ....runtime.common.errors import OptionError
from ....runtime.common.paths import is_folder
from ..reading.arguments import Arguments
from ..reading.entries import gather, text
from ..reading.files import read_lines
from ..reading.places import is_file, picture
from ..reading.records import Problems, Record

USAGE = "FOLDER[,CATEGORY]"
TASK = "yes-no"
_ENDINGS = (".jpg", ".png", ".jpeg")


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question, its key CATEGORY/NAME/N. Raises OptionError where there is no such folder."""
    root, wanted = arguments.path(0), arguments.place(1)
    if not is_folder(root):
        raise OptionError(f"mme: {root} is no folder; give the one that holds a folder per category")
    categories = [folder for folder in sorted(root.iterdir()) if folder.is_dir()]
    if wanted is not None:
        categories = [folder for folder in categories if folder.name == wanted]
    lines = (line for category in categories for line in _lines(category))

    def record(number: int, entry: tuple[str, Path, int, str]) -> Iterator[Record]:
        category, file, place, line = entry
        question, _, answer = line.rpartition("\t")
        if answer.strip() not in ("Yes", "No"):
            raise ValueError(f"{line!r:.80} is not 'QUESTION<tab>Yes' or 'QUESTION<tab>No'")
        folder = file.parent.parent / "images" if file.parent.name == "questions_answers_YN" else file.parent
        ways = (folder / f"{file.stem}{end}" for end in _ENDINGS)
        seen = next((path for path in ways if is_file(path, problems.inside)), None)
        if seen is None:
            raise ValueError(f"{folder} has no picture {file.stem!r:.80}")
        key, right = f"{category}/{file.stem}/{place}", answer.strip()
        yield Record(
            key,
            text({"question": question}, "question"),
            picture(seen, problems.inside),
            right,
            references=(right,),
        )

    return gather(((f"{one[1]}:{one[2]}", one) for one in lines), record, problems)


def _lines(category: Path) -> Iterator[tuple[str, Path, int, str]]:
    """(category, file, number from 1, line) of every line that is not blank."""
    inner = category / "questions_answers_YN"
    for file in sorted((inner if inner.is_dir() else category).glob("*.txt")):
        for number, line in enumerate(read_lines(file, damaged=True), 1):
            if line.strip():
                yield category.name, file, number, line
