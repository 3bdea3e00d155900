"""What every loader yields."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from ...runtime.errors import InputError
from ...runtime.images.load import load_image


@dataclass(frozen=True)
class ImageRef:
    """Where a picture comes from: a file, or a scene (seed, index)."""

    file: str | None = None
    scene: tuple[int, int] | None = None

    def load(self) -> Image.Image:
        """The picture, RGB, as the runtime reads it. Raises ImageError for a file that is no image or is damaged."""
        if self.scene is not None:
            from ..workshop.scenes.dataset import PICTURE
            from ..workshop.scenes.render import render
            from ..workshop.scenes.scene import sample_scene

            return Image.fromarray(render(sample_scene(*self.scene), PICTURE))
        return load_image(str(self.file))

    def absolute(self) -> ImageRef:
        """The same picture, found from any folder."""
        return self if self.file is None else ImageRef(file=str(Path(self.file).resolve()))

    def to_json(self) -> dict[str, object]:
        """The form that `from_json` reads."""
        return {"scene": list(self.scene)} if self.scene is not None else {"file": self.file}

    @classmethod
    def from_json(cls, value: dict) -> ImageRef:
        """Reads what `to_json` wrote; ValueError for anything else."""
        if isinstance(value.get("file"), str):
            return cls(file=value["file"])
        scene = value.get("scene")
        if (
            isinstance(scene, list)
            and len(scene) == 2
            and all(type(v) is int and 0 <= v < 1 << 63 for v in scene)
        ):
            return cls(scene=(scene[0], scene[1]))
        raise ValueError(f"image {value!r:.80} is neither a file nor a scene")


@dataclass(frozen=True)
class Record:
    """One request and, unless it is still to be generated, its text.

    `tokens` are a target's own output ids and win over `answer`.
    """

    key: str  # unique in its set, the same in every run
    prompt: str
    image: ImageRef | None = None
    answer: str | None = None
    tokens: tuple[int, ...] | None = None


@dataclass
class RecordSet(Sequence[Record]):
    """Records, and what was wrong with the others."""

    name: str
    records: list[Record]
    problems: list[str] = field(default_factory=list)
    generated_by: dict[str, str] | None = None  # name and fingerprint of the target that wrote the tokens

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index):  # type: ignore[override]
        return self.records[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def split(self, fraction: float) -> tuple[RecordSet, RecordSet]:
        """(all but the last `fraction`, the last `fraction`), at least one record each.

        Raises InputError when there are fewer than two records.
        """
        if len(self) < 2:
            raise InputError(f"{self.name} has {len(self)} usable record(s); training needs at least 2")
        last = min(len(self) - 1, max(1, round(len(self) * fraction)))
        return (
            RecordSet(self.name, self.records[:-last], self.problems, self.generated_by),
            RecordSet(f"{self.name} (last {last})", self.records[-last:], [], self.generated_by),
        )

    def identity(self) -> str:
        """Hash of everything that decides what a model sees: keys, prompts, texts, image references."""
        digest = hashlib.sha256()
        for r in self.records:
            image = r.image.to_json() if r.image else None
            digest.update(json.dumps([r.key, r.prompt, image, r.answer, r.tokens]).encode())
        return digest.hexdigest()


class Problems:
    """Collects bad records: printed with file and line as they are met, or raised at once when strict."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.found: list[str] = []

    def report(self, where: str, what: str) -> None:
        """Notes one bad record. Raises InputError when strict."""
        line = f"{where}: {what}"
        if self.strict:
            raise InputError(f"{line} (without --strict it would be skipped)")
        self.found.append(line)
        print(f"skipped {line}", file=sys.stderr)


def image_problem(path: Path) -> str | None:
    """What is wrong with an image file by its header, or None."""
    if not path.is_file():
        return f"image {str(path)!r:.200} does not exist"
    try:
        with Image.open(path) as image:
            if min(image.size) < 1:
                return f"image {path} is empty"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return f"image {path} cannot be read ({type(error).__name__})"
    return None
