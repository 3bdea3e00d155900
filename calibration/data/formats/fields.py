"""Any table, by a map of its fields given on the command line (`field_maps.py` says how one is written).

`fields:val.json,pictures,rows=data,prompt=question,image={image_id}.jpg,answers=answers[].answer`
"""

from __future__ import annotations

from ....runtime.common.errors import OptionError
from ..reading.arguments import Arguments
from ..reading.field_maps import NAMES, FieldMap, load_mapped
from ..reading.records import Problems, Record

USAGE = "TABLE[,FOLDER][,frames=N]" + "".join(f"[,{name}=FIELD]" for name in NAMES)
TASK = None


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per row of a .json, .jsonl, .csv or .tsv. Raises OptionError where the map names no request."""
    field_map = FieldMap.of({name: value for name, value in arguments.options.items() if name in NAMES})
    if not (field_map.prompt or field_map.image or field_map.video):
        raise OptionError("fields: the map names no request; give prompt=FIELD, image=FIELD or video=FIELD")
    return load_mapped(arguments, field_map, prompt, problems)
