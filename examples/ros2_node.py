"""A ROS 2 node: subscribes to camera images, publishes their captions.

Needs ROS 2 (rclpy, sensor_msgs, std_msgs): source its setup file, and install vlmexport into a virtual environment
of the same Python. The tests run this file against stand-ins for those packages, not against ROS.

    python examples/ros2_node.py --ros-args -p bundle:=/path/to/bundle -p device:=tensorrt

`device` is cpu unless it is given.
"""

from __future__ import annotations

import sys

import numpy as np
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import VlmexportError

USAGE = "usage: python examples/ros2_node.py --ros-args -p bundle:=/path/to/bundle"

try:
    import rclpy
    from rclpy.executors import ExternalShutdownException
    from rclpy.node import Node
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import Image
    from std_msgs.msg import String
except ModuleNotFoundError as error:
    sys.exit(f"{USAGE}\n{error.name} is missing: source ROS 2's setup file first")


class CaptionNode(Node):
    """Keeps one Session; drops images that arrive while it is busy (queue depth 1)."""

    def __init__(self) -> None:
        super().__init__("vlm_caption")
        bundle = self.declare_parameter("bundle", "").value
        if not bundle:
            raise VlmexportError(USAGE)
        self.session = Session.load(bundle, self.declare_parameter("device", "cpu").value)
        self.publisher = self.create_publisher(String, "caption", 10)
        # Cameras publish "best effort", which a reliable subscription would never receive.
        latest = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        self.create_subscription(Image, "image", self.on_image, latest)

    def on_image(self, message: Image) -> None:
        if message.encoding not in ("rgb8", "bgr8"):
            self.get_logger().error(f"image encoding {message.encoding!r}: convert to rgb8 or bgr8 first")
            return
        rows = np.frombuffer(message.data, np.uint8).reshape(message.height, message.step)
        pixels = rows[:, : 3 * message.width].reshape(message.height, message.width, 3)
        if message.encoding == "bgr8":
            pixels = pixels[:, :, ::-1]
        result = self.session.generate(image=np.ascontiguousarray(pixels), max_new_tokens=96)
        self.publisher.publish(String(data=result.text))


def main() -> None:
    rclpy.init()
    try:
        node = CaptionNode()
        try:
            rclpy.spin(node)
        except (KeyboardInterrupt, ExternalShutdownException):
            pass
        finally:
            node.destroy_node()
    finally:
        rclpy.try_shutdown()  # Ctrl-C has shut down already


if __name__ == "__main__":
    try:
        main()
    except VlmexportError as error:  # one line that names the cause
        sys.exit(str(error))
