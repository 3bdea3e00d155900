"""ScienceQA (Lu et al., arXiv 2209.09513): `problems.json`, an object of problems; `IMAGES/SPLIT/ID/image.png`.

A problem has question, choices, answer (a number), hint, image (null: text alone) and split (train, val or test). It is
asked as the hint and the question; the choices are ranked by the target. `pid_splits.json`, published with it, lists the
problems of each split by their ids, and of those that are made of them (trainval, minitrain, minival, minitest): it is read
where it lies beside `problems.json`. `images=only` leaves out problems without a picture, which not every model can be asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....runtime.common.errors import OptionError
from ..reading.arguments import Arguments
from ..reading.entries import listed
from ..reading.field_maps import FieldMap, load_mapped, value_at
from ..reading.files import read_json
from ..reading.places import is_file
from ..reading.records import Problems, Record

USAGE = "PROBLEMS.json,IMAGES[,SPLIT][,images=only|any]"
TASK = "choices"
MAP = FieldMap(prompt="{hint}\n{question}", image="{split}/{#}/{image}", choices="choices", choice="answer")
SPLITS = ("train", "val", "test")
"""Those that a problem itself says it is of."""
IDS = "pid_splits.json"


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per problem of the split, or of all. Raises OptionError for a split that nothing lists."""
    split, images = arguments.place(2), arguments.options.get("images", "any")
    if images not in ("only", "any"):
        raise OptionError(f"{arguments.form}: images={images!r:.40} is neither only nor any")
    ids = None if split is None else _ids(arguments.path(0).parent / IDS, split)

    def wanted(key: Any, row: dict[str, Any]) -> bool:
        if images == "only" and not value_at(row, "image"):
            return False
        return split is None or (value_at(row, "split") == split if ids is None else str(key) in ids)

    return load_mapped(arguments, MAP, prompt, problems, wanted)


def _ids(path: Path, split: str) -> set[str] | None:
    """The problems that the file lists under a split; None where there is no file and each problem says its own.

    Raises OptionError for a split that is in neither.
    """
    if is_file(path):
        document = read_json(path)
        if isinstance(document, dict) and split not in document:
            raise OptionError(f"{path} has no split {split!r:.40}; it has {', '.join(document)}")
        return {str(key) for key in listed(document, path, split, "ScienceQA's splits")}
    if split not in SPLITS:
        raise OptionError(
            f"scienceqa: split {split!r:.40} is none of {', '.join(SPLITS)}; others are listed in {IDS}, which is not "
            f"at {path}"
        )
    return None
