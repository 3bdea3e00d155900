"""Pictures of scenes, drawn with Pillow from shapes at any size."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageChops, ImageDraw

from .scene import Scene, SceneObject
from .vocabulary import COLOURS, WALLS

_TABLE_PAINT = {
    "wooden": (168, 112, 62),
    "white": (228, 228, 224),
    "grey": (126, 126, 128),
    "black": (44, 44, 48),
    "tiled": (206, 200, 188),
    "checked": (222, 222, 222),
}


def render(scene: Scene, size: int = 384) -> np.ndarray:
    """Draws a scene.

    Args:
        scene: what to draw.
        size: side of the square picture in pixels, at least 32. Below 256 the picture is drawn
            four times larger and averaged down.

    Returns:
        uint8 array (size, size, 3), RGB.

    Raises:
        ValueError: ``size`` is below 32.
    """
    if size < 32:
        raise ValueError(f"size must be at least 32 pixels, got {size}")
    factor = 4 if size < 256 else 1
    canvas = _draw(scene, size * factor)
    if factor > 1:
        canvas = canvas.resize((size, size), Image.Resampling.BOX)
    return np.asarray(canvas)


def box_of(scene: Scene, item: SceneObject) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of an object in the picture, as fractions of its side."""
    height = _height(item)
    left, top = _camera(scene, item.x - item.width / 2, item.y - height)
    right, bottom = _camera(scene, item.x + item.width / 2, item.y)
    return left, top, right, bottom


def drawing_order(scene: Scene) -> list[int]:
    """Positions of the objects from the farthest to the nearest, the order in which they hide."""
    return sorted(range(len(scene.objects)), key=lambda i: scene.objects[i].y)


def _camera(scene: Scene, x: float, y: float) -> tuple[float, float]:
    return (x - 0.5) * scene.zoom + 0.5 + scene.shift[0], (y - 0.6) * scene.zoom + 0.6 + scene.shift[1]


def _height(item: SceneObject) -> float:
    ratio = {"ball": 1.0, "cube": 1.0, "cylinder": 1.25, "cone": 1.25, "mug": 0.95, "star": 1.0, "ring": 1.0}
    return item.width * ratio.get(item.kind, 0.5)


def _draw(scene: Scene, side: int) -> Image.Image:
    canvas = _background(scene, side)
    order = drawing_order(scene)
    away = 1 if scene.light == "left" else -1
    for position in order:
        _shadow(canvas, scene, scene.objects[position], away, side)
    for position in order:
        _paste(canvas, scene, scene.objects[position], away, side)
    return ImageChops.multiply(canvas, _light(scene.light, side))


@lru_cache(maxsize=8)
def _light(side_name: str, side: int) -> Image.Image:
    row = np.linspace(1.0, 0.66, side)
    if side_name == "right":
        row = row[::-1]
    plane = np.broadcast_to((row * 255).astype(np.uint8)[None, :, None], (side, side, 3))
    return Image.fromarray(np.ascontiguousarray(plane))


def _tint(colour: tuple[int, int, int], factor: float) -> tuple[int, int, int]:
    return tuple(max(0, min(255, round(c * factor))) for c in colour)  # type: ignore[return-value]


def _background(scene: Scene, side: int) -> Image.Image:
    phase, tint, wall_tint, pitch = scene.texture
    wall = _tint(WALLS[scene.wall], 0.94 + 0.08 * wall_tint)
    canvas = Image.new("RGB", (side, side), wall)
    pen = ImageDraw.Draw(canvas)
    edge = round(_camera(scene, 0.5, scene.horizon)[1] * side)
    paint = _tint(_TABLE_PAINT[scene.table], 0.95 + 0.08 * tint)
    pen.rectangle((0, edge, side, side), fill=paint)
    if scene.table == "wooden":
        step = side * (0.065 + 0.02 * pitch)
        for line in range(round((side - edge) / step) + 1):
            y = edge + (line + phase) * step
            bend = side * 0.012 * math.sin(7 * (line + phase * 5))
            pen.line(
                (0, y, side * 0.5, y + bend, side, y - bend),
                fill=_tint(paint, 0.74),
                width=max(1, side // 80),
            )
    elif scene.table in ("tiled", "checked"):
        _grid(pen, scene, paint, edge, side)
    pen.rectangle((0, edge - side // 90, side, edge), fill=_tint(paint, 0.5))
    return canvas


def _grid(pen: ImageDraw.ImageDraw, scene: Scene, paint: tuple[int, int, int], edge: int, side: int) -> None:
    phase, _, _, pitch = scene.texture
    step = side * (0.12 + 0.03 * pitch)
    columns, rows = int(side / step) + 2, int((side - edge) / step) + 2
    if scene.table == "checked":
        for row in range(rows):
            for column in range(columns):
                if (row + column) % 2:
                    x, y = (column - phase) * step, edge + row * step
                    pen.rectangle((x, y, x + step, y + step), fill=_tint(paint, 0.55))
        return
    line = _tint(paint, 0.62)
    width = max(1, side // 90)
    for column in range(columns):
        x = (column - phase) * step
        pen.line((x, edge, x, side), fill=line, width=width)
    for row in range(rows):
        y = edge + (row + phase) * step
        pen.line((0, y, side, y), fill=line, width=width)


def _shadow(canvas: Image.Image, scene: Scene, item: SceneObject, away: int, side: int) -> None:
    left, _, right, bottom = (v * side for v in box_of(scene, item))
    width = right - left
    centre = (left + right) / 2 + away * width * 0.32
    box = [
        round(v)
        for v in (centre - width * 0.6, bottom - width * 0.16, centre + width * 0.6, bottom + width * 0.08)
    ]
    mask = Image.new("L", (box[2] - box[0], box[3] - box[1]), 0)
    ImageDraw.Draw(mask).ellipse((0, 0, mask.width - 1, mask.height - 1), fill=120)
    canvas.paste((18, 16, 20), (box[0], box[1]), mask)


def _paste(canvas: Image.Image, scene: Scene, item: SceneObject, away: int, side: int) -> None:
    left, top, right, bottom = (v * side for v in box_of(scene, item))
    width, height = right - left, bottom - top
    margin = width * 0.3  # room for a handle
    tile_size = (math.ceil(width + 2 * margin), math.ceil(height + 2))
    paint = _tint(COLOURS[item.colour], item.shade)
    tile = Image.new("RGB", tile_size, paint)
    mask = Image.new("L", tile_size, 0)
    box = (margin, 1.0, margin + width, 1.0 + height)
    _silhouette(ImageDraw.Draw(mask), item, box)
    pen = ImageDraw.Draw(tile)
    if item.pattern == "striped":
        _stripes(pen, item, box, tile_size)
    _details(tile, pen, item, box, paint, away)
    origin = (round(left - margin), round(top - 1))
    # A dark rim first: the same silhouette, moved by one line width each way.
    rim = max(1, round(side * 0.005))
    dark = _tint(paint, 0.35)
    for dx, dy in ((-rim, 0), (rim, 0), (0, -rim), (0, rim)):
        canvas.paste(dark, (origin[0] + dx, origin[1] + dy), mask)
    canvas.paste(tile, origin, mask)


def _silhouette(pen: ImageDraw.ImageDraw, item: SceneObject, box: tuple[float, float, float, float]) -> None:
    x0, y0, x1, y1 = box
    w, h = x1 - x0, y1 - y0
    cx, cy = (x0 + x1) / 2, (y0 + y1) / 2
    if item.kind in ("ball", "plate"):
        pen.ellipse(box, fill=255)
    elif item.kind == "ring":
        pen.ellipse(box, fill=255)
        pen.ellipse((cx - w * 0.24, cy - h * 0.24, cx + w * 0.24, cy + h * 0.24), fill=0)
    elif item.kind == "star":
        points = []
        for corner in range(10):
            radius = 0.54 if corner % 2 == 0 else 0.24
            angle = -math.pi / 2 + corner * math.pi / 5
            points.append((cx + w * radius * math.cos(angle), cy + h * 0.04 + h * radius * math.sin(angle)))
        pen.polygon(points, fill=255)
    elif item.kind == "cone":
        pen.polygon([(cx, y0), (x0, y1 - h * 0.1), (x1, y1 - h * 0.1)], fill=255)
        pen.ellipse((x0, y1 - h * 0.2, x1, y1), fill=255)
    elif item.kind == "cube":
        d = w * 0.24
        pen.polygon([(x0, y0 + d), (x0 + d, y0), (x1, y0), (x1, y1 - d), (x1 - d, y1), (x0, y1)], fill=255)
    elif item.kind == "cylinder":
        inset, cap = w * 0.14, h * 0.11
        pen.rectangle((x0 + inset, y0 + cap, x1 - inset, y1 - cap), fill=255)
        pen.ellipse((x0 + inset, y0, x1 - inset, y0 + 2 * cap), fill=255)
        pen.ellipse((x0 + inset, y1 - 2 * cap, x1 - inset, y1), fill=255)
    else:  # mug
        if item.handle < 0:
            body, loop = (
                (x0 + w * 0.2, y0, x1, y1),
                (x0 - w * 0.16, y0 + h * 0.2, x0 + w * 0.42, y0 + h * 0.8),
            )
        else:
            body, loop = (
                (x0, y0, x1 - w * 0.2, y1),
                (x1 - w * 0.42, y0 + h * 0.2, x1 + w * 0.16, y0 + h * 0.8),
            )
        pen.ellipse(loop, outline=255, width=max(2, round(w * 0.13)))
        pen.rounded_rectangle(body, radius=w * 0.12, fill=255)


def _stripes(
    pen: ImageDraw.ImageDraw,
    item: SceneObject,
    box: tuple[float, float, float, float],
    tile_size: tuple[int, int],
) -> None:
    w = box[2] - box[0]
    thick = w * 0.13
    step = w * 0.29
    start = box[0] + step * 0.36
    for line in range(4):
        x = start + line * step - thick * 0.2
        pen.rectangle((x, 0, x + thick, tile_size[1]), fill=(252, 252, 252))


def _details(
    tile: Image.Image,
    pen: ImageDraw.ImageDraw,
    item: SceneObject,
    box: tuple[float, float, float, float],
    paint: tuple[int, int, int],
    away: int,
) -> None:
    x0, y0, x1, y1 = box
    w, h = x1 - x0, y1 - y0
    cx = (x0 + x1) / 2
    # The side away from the light is darker.
    shade = Image.new("L", tile.size, 0)
    edge = x1 - w * 0.3 if away > 0 else x0 + w * 0.3
    ImageDraw.Draw(shade).rectangle(
        (edge, 0, tile.width, tile.height) if away > 0 else (0, 0, edge, tile.height), fill=70
    )
    tile.paste((10, 8, 16), (0, 0), shade)
    line = max(1, round(w * 0.035))
    dark = _tint(paint, 0.4)
    if item.kind == "ball":
        gx = cx - away * w * 0.2
        pen.ellipse((gx - w * 0.1, y0 + h * 0.16, gx + w * 0.1, y0 + h * 0.34), fill=(255, 255, 255))
    elif item.kind == "cube":
        d = w * 0.24
        pen.polygon([(x0, y0 + d), (x0 + d, y0), (x1, y0), (x1 - d, y0 + d)], fill=_tint(paint, 1.12))
        pen.polygon([(x1 - d, y0 + d), (x1, y0), (x1, y1 - d), (x1 - d, y1)], fill=_tint(paint, 0.6))
        pen.line((x0, y0 + d, x1 - d, y0 + d, x1, y0), fill=dark, width=line)
        pen.line((x1 - d, y0 + d, x1 - d, y1), fill=dark, width=line)
    elif item.kind == "cylinder":
        inset, cap = w * 0.14, h * 0.11
        pen.ellipse(
            (x0 + inset, y0, x1 - inset, y0 + 2 * cap), fill=_tint(paint, 1.12), outline=dark, width=line
        )
    elif item.kind == "mug":
        a, b = (x0 + w * 0.2, x1) if item.handle < 0 else (x0, x1 - w * 0.2)
        pen.ellipse((a + w * 0.04, y0 + h * 0.02, b - w * 0.04, y0 + h * 0.26), fill=_tint(paint, 0.3))
    elif item.kind == "plate":
        pen.ellipse((x0 + w * 0.22, y0 + h * 0.22, x1 - w * 0.22, y1 - h * 0.3), outline=dark, width=line)
    elif item.kind == "cone":
        pen.arc((x0, y1 - h * 0.2, x1, y1), 180, 360, fill=dark, width=line)
