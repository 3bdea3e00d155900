"""Films of scenes: the same tables, on which objects move, appear and leave between one frame and the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .scene import LANE_COUNT, Scene, in_lane, sample_scene, with_objects

FRAMES = (4, 6, 8)
RATE = 2.0
"""Frames per second, the rate at which Qwen2.5-VL samples a video: it sees all of them."""
MOST_EVENTS = 3
LEAST_OBJECTS = 2


@dataclass(frozen=True)
class Event:
    """What happens to one object, between the frames `time` - 1 and `time`."""

    kind: str  # "move", "appear" or "leave"
    place: int  # of the object in the film's scene
    time: int
    lane: int = -1  # where a "move" ends


@dataclass(frozen=True)
class Film:
    """Frames of one table. `scene` has every object that is ever there, each in the lane in which it is first seen;
    `events` are in the order of time, at most one an object and at most one between two frames."""

    scene: Scene
    events: tuple[Event, ...]
    count: int  # frames

    @property
    def frames(self) -> tuple[Scene, ...]:
        """A scene a frame, with relations between what is there."""
        return tuple(self._frame(time) for time in range(self.count))

    def places(self, time: int) -> list[int]:
        """Which objects of `scene` are there in a frame, from left to right."""
        absent = {e.place for e in self.events if (e.kind == "appear" and time < e.time)}
        absent |= {e.place for e in self.events if e.kind == "leave" and time >= e.time}
        return [place for place in range(len(self.scene.objects)) if place not in absent]

    def _frame(self, time: int) -> Scene:
        moved = {e.place: e.lane for e in self.events if e.kind == "move" and e.time <= time}
        objects = self.scene.objects
        now = [in_lane(objects[p], moved[p]) if p in moved else objects[p] for p in self.places(time)]
        return with_objects(self.scene, now)


def sample_film(seed: int, index: int) -> Film:
    """The film number ``index`` of world ``seed``, with the table and the objects of the scene of that number.

    Every frame has at least two objects: of a single one too much would be known.

    Raises:
        ValueError: ``index`` belongs to no split.
    """
    scene = sample_scene(seed, index)
    rng = np.random.default_rng([seed, index, 211])
    count = FRAMES[int(rng.integers(len(FRAMES)))]
    objects = len(scene.objects)
    while True:
        number = int(rng.integers(1, min(MOST_EVENTS, objects) + 1))
        places = rng.permutation(objects)[:number]
        times = np.sort(rng.permutation(count - 1)[:number]) + 1
        events = tuple(
            _event(rng, scene, int(place), int(time)) for place, time in zip(places, times, strict=True)
        )
        film = Film(scene, events, count)
        if all(len(film.places(time)) >= LEAST_OBJECTS for time in range(count)):
            return film


def _event(rng: np.random.Generator, scene: Scene, place: int, time: int) -> Event:
    kind = ("move", "appear", "leave")[int(rng.integers(3))]
    lane = (scene.objects[place].lane + int(rng.integers(1, LANE_COUNT))) % LANE_COUNT
    return Event(kind, place, time, lane) if kind == "move" else Event(kind, place, time)
