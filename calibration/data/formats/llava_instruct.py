"""LLaVA's instruction data (Liu et al., arXiv 2304.08485): a list of id, image and conversations.

`llava_instruct_150k.json`, `llava_v1_5_mix665k.json` and the pre-training file `blip_laion_cc_sbu_558k.json` have this
layout. `first` keeps the first answer of each conversation, as pre-training and ViSpec's prompts need it.
"""

from __future__ import annotations

from typing import Any

from ..reading.arguments import Arguments
from ..reading.entries import fields, text
from ..reading.places import picture
from ..reading.records import ImageRef, Problems, Record
from ..reading.turns import load_conversations

USAGE = "CONVERSATIONS.json,IMAGES[,turns=first|all]"
TASK = None


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per answer, or per conversation with `turns=first`; entries without an image are text alone.

    Raises OptionError for a file of another layout.
    """
    folder = arguments.path(1)

    def picture_of(entry: Any) -> ImageRef | None:
        named = fields(entry).get("image") is not None
        return picture(folder / text(entry, "image"), problems.inside) if named else None

    return load_conversations(arguments, problems, "LLaVA-instruct", picture_of, ["image"])
