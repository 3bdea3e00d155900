from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Publisher:
    def publish(self, message: Any) -> None:
        print(message.data)


class Logger:
    def error(self, text: str) -> None:
        print(f"error: {text}")


class Node:
    def __init__(self, name: str) -> None:
        self.callback: Callable[[Any], None]

    def declare_parameter(self, name: str, default: str) -> SimpleNamespace:
        return SimpleNamespace(value=sys.argv[1] if name == "bundle" and len(sys.argv) > 1 else default)

    def create_publisher(self, kind: type, topic: str, depth: int) -> Publisher:
        return Publisher()

    def create_subscription(self, kind: type, topic: str, callback: Callable[[Any], None], qos: Any) -> None:
        self.callback = callback

    def get_logger(self) -> Logger:
        return Logger()

    def destroy_node(self) -> None:
        del self.callback
