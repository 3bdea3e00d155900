"""What each row of the tower says: one word about one object, from left to right, then about the setting.

A frozen language model reads rows that look like the embeddings of words, and binds what stands side by side: a colour right
before its kind. One row a word lets it; one row an object does not.
"""

from __future__ import annotations

import numpy as np
from vlmexport.calibration.data.scenes.scene import MOST_OBJECTS
from vlmexport.calibration.data.scenes.vocabulary import (
    COLOURS,
    GAPS,
    KINDS,
    LANES,
    LIGHTS,
    PATTERNS,
    SIZES,
    TABLES,
    WALLS,
)

from ..common.labels import NONE

BLANK = "-"
"""What a row says that has nothing to say: of an object that is not there, or a spare one."""
ABOUT_OBJECTS: dict[str, tuple[str, ...]] = {
    "size": SIZES,
    "pattern": PATTERNS,
    "colour": tuple(COLOURS),
    "kind": (*KINDS, BLANK),
    "gap": GAPS,
    "lane": LANES,
}
"""Fields of the labels in the order of an object's rows, with a word for each value."""
ABOUT_SCENES: dict[str, tuple[str, ...]] = {
    "table": TABLES,
    "wall": tuple(WALLS),
    "light": LIGHTS,
    "count": ("zero", "one", "two", "three", "four", "five"),
}
FIELDS = (*MOST_OBJECTS * tuple(ABOUT_OBJECTS), *ABOUT_SCENES)
"""The field of every row that is not spare."""
WORDS = tuple(
    dict.fromkeys(
        [BLANK, *(w for table in (ABOUT_OBJECTS, ABOUT_SCENES) for words in table.values() for w in words)]
    )
)
_NUMBERS = {
    field: np.array([*map(WORDS.index, words), WORDS.index(BLANK)])
    for field, words in (ABOUT_OBJECTS | ABOUT_SCENES).items()
}


def said(labels: dict[str, np.ndarray], num_embeds: int) -> np.ndarray:
    """The number in `WORDS` of what every row says.

    Args:
        labels: of N scenes, as `label_table` has them. num_embeds: of a picture; those behind `FIELDS` are spare.

    Returns:
        int64 (N, num_embeds).
    """
    count = len(labels["count"])
    numbers = np.full((count, num_embeds), WORDS.index(BLANK), np.int64)
    each = len(ABOUT_OBJECTS)
    for place, field in enumerate(ABOUT_OBJECTS):
        values = labels[field]  # (N, objects)
        numbers[:, place : MOST_OBJECTS * each : each] = _NUMBERS[field][np.where(values == NONE, -1, values)]
    for place, field in enumerate(ABOUT_SCENES, MOST_OBJECTS * each):
        numbers[:, place] = _NUMBERS[field][labels[field]]
    return numbers
