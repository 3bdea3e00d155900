"""What is seen of scenes: pictures, pairs of pictures, films."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image

from ....runtime.images.video import Video
from .dataset import PICTURE
from .film import RATE, sample_film
from .pair import sample_pair
from .render import render
from .scene import Scene, sample_scene


def _drawn(scene: Scene) -> Image.Image:
    return Image.fromarray(render(scene, PICTURE))


SHOWN: dict[str, Callable[[int, int], Any]] = {
    "picture": lambda seed, index: _drawn(sample_scene(seed, index)),
    "pair": lambda seed, index: [_drawn(scene) for scene in sample_pair(seed, index).scenes],
    "film": lambda seed, index: Video([_drawn(scene) for scene in sample_film(seed, index).frames], RATE),
}
"""What is seen of the scene (seed, index): its picture, the pair of pictures of that number, or the film."""
