"""MSVD-QA (Xu et al., ACM MM 2017): `val_qa.json`, a list of id, video_id, question, answer.

video_id N is `vidN` in MAPPING (`youtube_mapping.txt`: the name of a video, a space, vidN), whose file is that name with
any ending; without MAPPING the file is `vidN` with any ending. MSRVTT-QA has the same layout (`videoN`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....runtime.common.errors import OptionError
from ....runtime.common.paths import is_folder
from ..reading.arguments import Arguments
from ..reading.entries import collect, identifier, text
from ..reading.files import read_json, read_lines
from ..reading.places import video_file
from ..reading.records import Problems, Record

USAGE = "QUESTIONS.json,VIDEOS[,MAPPING.txt][,frames=N]"
TASK = "exact"


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question; the target sees the video, or `frames` pictures of it.

    Raises OptionError for files of another layout.
    """
    path, folder, mapping = arguments.path(0), arguments.path(1), arguments.place(2)
    document, frames = read_json(path), arguments.count("frames")
    if not isinstance(document, list):
        raise OptionError(f"{path} is not a list of questions: not the layout of MSVD-QA")
    if not is_folder(folder):
        raise OptionError(f"{arguments.form}: {folder} is no folder of videos")
    files = {file.stem: file for file in sorted(folder.iterdir())}
    named = {} if mapping is None else _mapping(Path(mapping), problems)

    def record(number: int, entry: Any) -> Iterator[Record]:
        video = identifier(entry, "video_id")
        question, answer = text(entry, "question"), text(entry, "answer")
        stems = [named.get(f"vid{video}"), f"vid{video}", f"video{video}"]
        file = next((files[stem] for stem in stems if stem in files), None)
        if file is None:
            raise ValueError(f"{folder} has no video {stems[0] or stems[1]!r:.80}")
        key = str(entry.get("id", number))
        yield Record(key, question, video_file(file, frames, problems.inside), answer, references=(answer,))

    return collect(path, "", document, record, problems)


def _mapping(path: Path, problems: Problems) -> dict[str, str]:
    """Name of the file by vidN."""
    files = {}
    for number, line in enumerate(read_lines(path), 1):
        parts = line.split()
        if len(parts) == 2:
            files[parts[1]] = parts[0]
        elif parts:
            problems.report(f"{path}:{number}", f"{line!r:.80} is not 'NAME vidN'")
    return files
