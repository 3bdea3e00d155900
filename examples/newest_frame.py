"""Caption what a camera sees now: a thread captures, the model is always given the newest frame, older ones are dropped.

    python examples/newest_frame.py demo/bundle 0              # a camera of OpenCV's, by its number
    python examples/newest_frame.py demo/bundle rtsp://…       # or whatever else cv2.VideoCapture opens
    python examples/newest_frame.py demo/bundle pictures/      # a folder of pictures stands for one

A frame that came in while the model was busy is old when the model is free. So frames are not queued: the capture thread
has one place for a frame, and a new one takes it over. A session serves one call at a time; where several threads ask
the same one, the second call raises `BusyError` at once.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vlmexport.runtime import BusyError, ImageError, Session, VlmexportError
from vlmexport.runtime.images.folder import picture_files


class NewestFrame:
    """One place for a frame, between the thread that captures and the one that asks the model."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frame: tuple[int, Any] | None = None
        self._end: BaseException | None = None
        self._count = 0

    def put(self, frame: Any) -> None:
        """Leave a frame; one that nobody has taken is dropped."""
        with self._changed:
            self._frame = (self._count, frame)
            self._count += 1
            self._changed.notify()

    def end(self, reason: BaseException) -> None:
        """No frame comes any more."""
        with self._changed:
            self._end = reason
            self._changed.notify()

    def take(self) -> tuple[int, Any]:
        """(its number, the frame that came last), as soon as there is one that was not taken. Raises why none comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._end is not None)
            if self._frame is None:
                assert self._end is not None
                raise self._end
            frame, self._frame = self._frame, None
            return frame


def frames(source: str, fps: float) -> Iterator[np.ndarray]:
    """uint8 arrays [H, W, 3], RGB. Raises `ImageError`."""
    if Path(source).is_dir():
        for path in itertools.cycle(picture_files(Path(source))):
            yield np.asarray(Image.open(path).convert("RGB"))
            time.sleep(1 / fps)
    try:
        import cv2  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ImageError(f"{source}: a camera needs OpenCV (pip install opencv-python-headless)") from None
    camera = cv2.VideoCapture(int(source) if source.isdigit() else source)
    try:
        while True:
            found, frame = camera.read()
            if not found:
                raise ImageError(f"{source}: the camera gives no frame")
            yield np.ascontiguousarray(frame[:, :, ::-1])  # OpenCV has BGR
    finally:
        camera.release()


def capture(source: str, fps: float, newest: NewestFrame) -> None:
    """What the thread does until the program ends."""
    try:
        for frame in frames(source, fps):
            newest.put(frame)
    except Exception as error:
        newest.end(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument(
        "source", help="number of a camera, what cv2.VideoCapture opens, or a folder of pictures"
    )
    parser.add_argument("--answers", type=int, help="end after so many (default: never)")
    parser.add_argument("--fps", type=float, default=30.0, help="of a folder")
    parser.add_argument("--device", default="cpu", help="cpu; on a GPU cuda or tensorrt")
    options = parser.parse_args()
    newest = NewestFrame()
    with Session.load(options.bundle, options.device) as session:
        threading.Thread(target=capture, args=(options.source, options.fps, newest), daemon=True).start()
        answered = range(options.answers) if options.answers is not None else itertools.count()
        for _, (number, frame) in zip(answered, iter(newest.take, None), strict=False):
            try:
                result = session.generate(image=frame, max_new_tokens=96)
            except BusyError:  # another thread of yours is asking: the next frame may be luckier
                continue
            print(f"frame {number}: {result.text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (VlmexportError, OSError) as error:  # one line that names the cause
        sys.exit(str(error))
