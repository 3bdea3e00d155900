"""What every loader yields."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ....runtime.common.errors import ImageError, InputError
from ....runtime.images.load import load_image
from ....runtime.images.video import Clip, Video, open_video


@dataclass(frozen=True)
class ImageRef:
    """Where a picture or video comes from: a file, a scene (seed, index), a video's file or folder of pictures, or a row
    of a `datasets` set (source, configuration, split, row, column). Of a scene `shown` is what is seen: its picture, the pair
    of pictures of that number, or the film. With `frames` a video is that many of its pictures, with
    `segment` as well of that part alone, (start, end) in seconds where the two are floats, in frames where whole numbers."""

    file: str | None = None
    scene: tuple[int, int] | None = None
    shown: str = "picture"
    video: str | None = None
    frames: int | None = None
    segment: tuple[float, float] | None = None
    row: tuple[str, str, str, int, str] | None = None

    def __post_init__(self) -> None:
        if self.segment is not None and self.frames is None:
            raise ValueError(
                f"the segment {list(self.segment)} of a film is read as pictures; give the data frames=N"
            )

    def load(self) -> Any:
        """The picture, RGB, as the runtime reads it; of a pair both; of a video a `Video`, or with `frames` a list of pictures.

        Raises ImageError for a file that is no image or is damaged.
        """
        if self.video is not None:
            return Video(self.video) if self.frames is None else self._frames(self.frames)
        if self.row is not None:
            from .hub_rows import read_picture

            return read_picture(*self.row)
        if self.scene is not None:
            from ..scenes.pictures import SHOWN

            return SHOWN[self.shown](*self.scene)
        return load_image(str(self.file))

    def _frames(self, count: int) -> list[Image.Image]:
        """From the middles of `count` equal parts of a video or its segment, or all of a shorter one."""
        clip = open_video(Video(self.video))
        first, end = (0, clip.count) if self.segment is None else _within(clip, self.segment)
        wanted = min(count, end - first)
        return clip.read([first + (2 * i + 1) * (end - first) // (2 * wanted) for i in range(wanted)])

    def absolute(self) -> ImageRef:
        """The same picture, found from any folder."""
        changed = {
            n: str(Path(p).resolve()) for n in ("file", "video") if (p := getattr(self, n)) is not None
        }
        return replace(self, **changed)

    def to_json(self) -> dict[str, object]:
        """The form that `from_json` reads."""
        if self.scene is not None:
            shown = {} if self.shown == "picture" else {"shown": self.shown}
            return {"scene": list(self.scene), **shown}
        if self.video is not None:
            part = {} if self.segment is None else {"segment": list(self.segment)}
            return {"video": self.video, "frames": self.frames, **part}
        return {"file": self.file} if self.row is None else {"row": list(self.row)}

    @classmethod
    def from_json(cls, value: dict) -> ImageRef:
        """Reads what `to_json` wrote; ValueError for anything else."""
        if isinstance(value.get("file"), str):
            return cls(file=value["file"])
        video, frames, row = value.get("video"), value.get("frames"), value.get("row")
        if isinstance(video, str) and (frames is None or (type(frames) is int and frames > 0)):
            part = value.get("segment")
            return cls(video=video, frames=frames, segment=None if part is None else read_segment(part))
        if isinstance(row, list) and [type(v) for v in row] == [str, str, str, int, str]:
            return cls(row=tuple(row))  # type: ignore[arg-type]
        scene = value.get("scene")
        if (
            isinstance(scene, list)
            and len(scene) == 2
            and all(type(v) is int and 0 <= v < 1 << 63 for v in scene)
        ):
            from ..scenes.pictures import SHOWN

            shown = value.get("shown", "picture")
            if shown in SHOWN:
                return cls(scene=(scene[0], scene[1]), shown=shown)
        raise ValueError(f"image {value!r:.80} is neither a file nor a scene, video or row")


def read_segment(value: object) -> tuple[float, float]:
    """`[start, end]` of a video as JSON has it, with the type of its start: seconds stay floats, frames whole numbers.
    ValueError for anything else."""
    if isinstance(value, list) and [type(v) in (int, float) for v in value] == [True, True]:
        start, end = value
        if 0 <= start < end < 1 << 53:
            if isinstance(start, float):
                return start, float(end)
            if isinstance(end, int):
                return start, end
    raise ValueError(
        f"segment {value!r:.80} is not [start, end] in seconds (floats) or frames (whole numbers)"
    )


def _within(clip: Clip, segment: tuple[float, float]) -> tuple[int, int]:
    """(first frame, the one behind the last) of a segment; one that outlasts its film ends with it.

    Raises ImageError where it begins behind the film's end, and for seconds of a film without a rate.
    """
    start, end = segment
    if isinstance(start, float):
        if clip.fps is None:
            raise ImageError(
                f"{clip.name}: {start} to {end} seconds of it are meant, but a folder has no rate; give the file"
            )
        start, end = start * clip.fps, end * clip.fps
    if start >= clip.count:
        raise ImageError(f"{clip.name}: the segment {segment} begins behind its last frame, {clip.count - 1}")
    return int(start), max(int(min(end, clip.count)), int(start) + 1)


@dataclass(frozen=True)
class Record:
    """One request and, unless it is still to be generated, its text.

    `tokens` are a target's own output ids and win over `answer`. `history` are the turns before `prompt`, each (role,
    text); the picture stands in the first of the user's. What an answer is judged by: `references`, texts that are all
    right, and `choices`, texts to rank, of which `choice` is the right one.
    """

    key: str  # unique in its set, the same in every run
    prompt: str
    image: ImageRef | None = None
    answer: str | None = None
    tokens: tuple[int, ...] | None = None
    history: tuple[tuple[str, str], ...] = ()
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    choice: int | None = None


@dataclass
class RecordSet(Sequence[Record]):
    """Records, and what was wrong with the others."""

    name: str
    records: list[Record]
    problems: list[str] = field(default_factory=list)
    generated_by: dict[str, str] | None = None  # name and fingerprint of the target that wrote the tokens
    task: str | None = None  # what its answers are judged by, a name of evaluation/quality
    mixed: bool = False  # of several sets that are judged by different tasks

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index):  # type: ignore[override]
        return self.records[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def asked_with(self, suffix: str) -> RecordSet:
        """The same with `suffix` behind every prompt, a space between them; it becomes part of the prompts."""
        if not suffix:
            return self
        return replace(
            self, records=[replace(r, prompt=f"{r.prompt} {suffix}".strip()) for r in self.records]
        )

    def split(self, fraction: float) -> tuple[RecordSet, RecordSet]:
        """(all but the last `fraction`, the last `fraction`), at least one record each.

        Raises InputError when there are fewer than two records.
        """
        if len(self) < 2:
            raise InputError(f"{self.name} has {len(self)} usable record(s); training needs at least 2")
        last = min(len(self) - 1, max(1, round(len(self) * fraction)))
        return (
            RecordSet(
                self.name, self.records[:-last], self.problems, self.generated_by, self.task, self.mixed
            ),
            RecordSet(
                f"{self.name} (last {last})",
                self.records[-last:],
                [],
                self.generated_by,
                self.task,
                self.mixed,
            ),
        )

    def identity(self) -> str:
        """Hash of everything that decides what a model sees: keys, prompts, earlier turns, texts, image references."""
        digest = hashlib.sha256()
        for r in self.records:
            image = r.image.to_json() if r.image else None
            before = [r.history] if r.history else []
            digest.update(json.dumps([r.key, r.prompt, image, r.answer, r.tokens, *before]).encode())
        return digest.hexdigest()


class Problems:
    """Collects bad records: printed with file and line as they are met, or raised at once when strict. A reading ends where
    it has `limit` good ones: what lies behind is not looked at, nor its pictures opened."""

    def __init__(self, strict: bool, limit: int | None = None, inside: Path | None = None) -> None:
        """`inside`: the folder that pictures and videos have to lie in, links followed (`places.py`)."""
        self.strict, self.limit, self.inside = strict, limit, inside
        self.lines: list[str] = []

    def report(self, where: str, what: str) -> None:
        """Notes one bad record. Raises InputError when strict."""
        line = f"{_line(where, 400)}: {_line(what, 600)}"
        if self.strict:
            raise InputError(f"{line} (without --strict it would be skipped)")
        self.lines.append(line)
        print(f"skipped {line}", file=sys.stderr)

    def tell(self, line: str) -> None:
        """Says what is left out of records that are good. Raises InputError when strict."""
        if self.strict:
            raise InputError(f"{line} (without --strict it would be left out)")
        print(line, file=sys.stderr)


def _line(text: str, most: int) -> str:
    """What data made somebody say, in one line of at most so many characters."""
    text = (
        text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:most])
    )
    return text if len(text) <= most else f"{text[:most]}…"
