"""Damaged and odd pictures, read as a request reads them."""

from __future__ import annotations

import random
from pathlib import Path

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import mutate_bytes

from .base import call, picture

SEEDS = (
    ("a.png", "RGB"), ("b.jpg", "RGB"), ("c.gif", "P"), ("d.bmp", "RGB"), ("e.tiff", "RGB"), ("f.webp", "RGB"),
    ("g.png", "RGBA"), ("h.png", "LA"), ("i.png", "I;16"), ("j.tiff", "F"), ("k.png", "1"), ("l.ppm", "RGB"), ("m.tiff", "CMYK"),
)  # fmt: skip
"""Names of pictures and their modes."""


class Seeds:
    """Pictures of many formats."""

    def __init__(self, folder: Path):
        self._files = [_made(folder / name, mode).read_bytes() for name, mode in SEEDS]
        self._names = [name for name, _ in SEEDS]

    def make(self, rng: random.Random, folder: Path) -> Case:
        at = rng.randrange(len(self._files))
        path = folder / self._names[at]
        path.write_bytes(mutate_bytes(self._files[at], rng))

        def read() -> None:
            from vlmexport.runtime.images.load import load_image

            load_image(path)

        return Case(call(read))


def prepare(folder: Path) -> Seeds:
    """Pictures of many formats."""
    return Seeds(folder)


def _made(path: Path, mode: str) -> Path:
    if mode not in ("I;16", "F"):
        return picture(path, mode=mode)
    from PIL import Image

    grey = Image.open(picture(path.with_suffix(".seed.png"), mode="L"))
    (grey.convert("I").convert("I;16") if mode == "I;16" else grey.convert("F")).save(path)
    return path
