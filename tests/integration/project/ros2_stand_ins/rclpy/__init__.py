"""Just enough of ROS 2's rclpy for `examples/ros2_node.py`: `spin` delivers one picture in three encodings.

The program's arguments are the value of the parameter `bundle` and the picture.
"""

from __future__ import annotations

import sys

import numpy as np
from PIL import Image as Pictures
from sensor_msgs.msg import Image

from .executors import ExternalShutdownException
from .node import Node

running = False


def init() -> None:
    global running
    running = True


def try_shutdown() -> None:
    global running
    assert running
    running = False


def spin(node: Node) -> None:
    pixels = np.asarray(Pictures.open(sys.argv[2]).convert("RGB"))
    height, width, _ = pixels.shape
    padded = np.pad(pixels[:, :, ::-1].reshape(height, 3 * width), ((0, 0), (0, 5)))
    for message in (
        Image("rgb8", height, width, 3 * width, pixels.tobytes()),
        Image("bgr8", height, width, 3 * width + 5, padded.tobytes()),
        Image("mono8", height, width, width, pixels[:, :, 0].tobytes()),
    ):
        node.callback(message)
    raise ExternalShutdownException
