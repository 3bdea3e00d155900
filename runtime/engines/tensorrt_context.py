"""An execution context of TensorRT as a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Buffer, View
from .device import DeviceEngine


class BoundContext:
    """An execution context with shapes and addresses that stay. `keep` holds what lies at the addresses."""

    def __init__(
        self,
        engine: DeviceEngine,
        graph: str,
        context: Any,
        keep: tuple[View, ...],
        failed: Callable[[str, str], Exception],
    ):
        """`failed(step, what)` is the error of a step that TensorRT did not take."""
        self._engine, self._graph, self._keep, self._failed = engine, graph, keep, failed
        self._context: Any = context
        self._memory: Buffer | None = None
        self.captured = False

    @property
    def capturable(self) -> bool:
        """Whether TensorRT would let a stream capture this call."""
        is_capturable = getattr(self._context, "is_stream_capturable", None)  # of TensorRT-RTX
        return is_capturable is None or is_capturable(self._engine.stream)

    def use(self, memory: Buffer) -> None:
        """Keep activations in `memory`."""
        self._memory = memory
        if hasattr(self._context, "set_device_memory"):
            self._context.set_device_memory(memory.address, memory.nbytes)
        else:  # of an older TensorRT
            self._context.device_memory = memory.address

    def run(self) -> None:
        engine = self._engine
        self.captured = self.captured or engine.capturing
        if not self._context.execute_async_v3(engine.stream):
            raise self._failed("run", self._graph)

    def forget(self) -> None:
        """Let the context go before its plan."""
        self._context = None
