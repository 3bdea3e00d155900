"""Flickr8k (Hodosh et al., JAIR 2013): five captions per picture, a line each.

CAPTIONS is `Flickr8k.token.txt` (`NAME.jpg#N`, a tab, the caption) or the `captions.txt` that is also in circulation
(`image,caption`, with that header). SPLIT is a list of names, such as `Flickr_8k.testImages.txt`. Flickr30k's token file
has the same layout.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from ..reading.arguments import Arguments
from ..reading.entries import gather, text
from ..reading.files import read_lines
from ..reading.places import picture
from ..reading.records import Problems, Record

USAGE = "CAPTIONS.txt,IMAGES[,SPLIT.txt]"
TASK = "captions"


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per picture in the file's order. A name of SPLIT without captions is a bad record.

    Raises OptionError for files that cannot be read.
    """
    path, folder, split = arguments.path(0), arguments.path(1), arguments.place(2)
    captions: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip() or (number == 1 and line.strip() == "image,caption"):
            continue
        try:
            name, caption = _parted(line)
            captions.setdefault(name, []).append(text({"caption": caption}, "caption"))
        except ValueError as error:
            problems.report(f"{path}:{number}", str(error))
    wanted = (
        [(f"{path}: {name}", name) for name in captions]
        if split is None
        else [
            (f"{split}:{n}", line.strip())
            for n, line in enumerate(read_lines(Path(split)), 1)
            if line.strip()
        ]
    )

    def record(number: int, name: str) -> Iterator[Record]:
        if name not in captions:
            raise ValueError(f"{path} has no caption of {name!r:.80}")
        told = captions[name]
        yield Record(name, prompt, picture(folder / name, problems.inside), told[0], references=tuple(told))

    return gather(wanted, record, problems)


def _parted(line: str) -> tuple[str, str]:
    """(file name, caption) of a line; ValueError for another layout."""
    name, tab, caption = line.partition("\t")
    if not tab:
        fields = next(csv.reader([line]))
        name, caption = fields[0], ",".join(fields[1:])
    name = name.strip()
    head, mark, number = name.rpartition("#")
    if tab and mark and number.isdecimal():
        name = head
    if not name or not caption.strip():
        raise ValueError(f"{line.strip()!r:.80} is neither 'NAME#N<tab>CAPTION' nor 'NAME,CAPTION'")
    return name, caption
