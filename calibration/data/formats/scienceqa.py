"""ScienceQA (Lu et al., arXiv 2209.09513): `problems.json`, an object of problems; `IMAGES/SPLIT/ID/image.png`.

A problem has question, choices, answer (a number), hint, image (null: text alone) and split (train, val, test, and the
minis). It is asked as the hint and the question; the choices are ranked by the target.
"""

from __future__ import annotations

from ..arguments import Arguments
from ..field_maps import FieldMap, load_mapped
from ..records import Problems, Record

USAGE = "PROBLEMS.json,IMAGES[,SPLIT]"
TASK = "choices"
MAP = FieldMap(
    prompt="{hint}\n{question}", image="{split}/{#}/{image}", choices="choices", choice="answer", split="split"
)  # fmt: skip


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per problem of the split, or of all."""
    return load_mapped(arguments, MAP, prompt, problems, arguments.place(2))
