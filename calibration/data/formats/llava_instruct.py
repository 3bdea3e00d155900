"""LLaVA's instruction data (Liu et al., arXiv 2304.08485): a list of id, image and conversations.

`llava_instruct_150k.json`, `llava_v1_5_mix665k.json` and the pre-training file `blip_laion_cc_sbu_558k.json` have this
layout. `first` keeps the first answer of each conversation, as pre-training and ViSpec's prompts need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....runtime.errors import OptionError
from ..arguments import Arguments
from ..entries import collect, fields, picture, read_json, text
from ..records import Problems, Record
from ..turns import turn_records

USAGE = "CONVERSATIONS.json,IMAGES[,turns=first|all]"
TASK = None


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per answer, or per conversation with `turns=first`; entries without an image are text alone.

    Raises OptionError for a file of another layout.
    """
    path, folder = arguments.path(0), arguments.path(1)
    turns = arguments.options.get("turns", "all")
    if turns not in ("first", "all"):
        raise OptionError(f"{arguments.form}: turns={turns!r:.40} is neither first nor all")
    document = read_json(path)
    if not isinstance(document, list):
        raise OptionError(f"{path} is not a list of conversations: not the layout of LLaVA-instruct")

    def record(number: int, entry: Any) -> Iterator[Record]:
        image = None if fields(entry).get("image") is None else picture(folder / text(entry, "image"))
        found = list(turn_records(f"{number}-{entry.get('id', '')}", entry, image))
        yield from found[:1] if turns == "first" else found

    return collect(path, "", document, record, problems)
