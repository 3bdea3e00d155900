"""A CUDA provider that is not there: sessions whose runs are put into a stream, and captured by number as ONNX Runtime does it.

With `enable_cuda_graph` a run under a number is done twice as it is, then captured and replayed, all in one call; from then on
that number replays what was captured, whatever it is given. Runs under −1 are done as they are, and a run without a number is
one under 0 (`InferenceSession::Run` of ONNX Runtime, `OnRunStart` and `OnRunEnd` of its CUDA provider).
"""

from __future__ import annotations

from typing import Any

import onnxruntime as ort

from tests.support.as_library import as_library

from .fake_cuda import FakeCuda

WARM_UPS = 2


def _entry(options: ort.RunOptions, name: str) -> str | None:
    try:
        return options.get_run_config_entry(name)
    except Exception:  # it was not set
        return None


class FakeSession:
    """See the module. `computes` does the work when the stream gets there."""

    def __init__(self, computes: ort.InferenceSession, cuda: FakeCuda, captures: bool) -> None:
        self._computes, self._cuda, self.captures = computes, cuda, captures
        self.captured: dict[int, Any] = {}
        """Number → the binding that was captured."""
        self.runs = self.replays = 0
        self.broken: str | None = None
        """What a capture fails with."""

    def get_inputs(self) -> Any:
        return self._computes.get_inputs()

    def get_outputs(self) -> Any:
        return self._computes.get_outputs()

    def io_binding(self) -> ort.IOBinding:
        return self._computes.io_binding()

    def release_captured_graph(self, number: int) -> None:
        """Of ONNX Runtime 1.31."""
        assert not self._cuda.queue.queue, "what was captured is given back while it may be at work"
        self.captured.pop(number, None)  # a program may never have been launched

    @as_library("onnxruntime")
    def run_with_iobinding(self, binding: ort.IOBinding, options: ort.RunOptions) -> None:
        waits = _entry(options, "disable_synchronize_execution_providers") != "1"
        number = int(_entry(options, "gpu_graph_id") or 0)
        self.runs += 1
        if not self.captures or number == -1:
            self._put(binding)
        elif number in self.captured:
            self.replays += 1
            self._put(self.captured[number])
        else:
            for _ in range(WARM_UPS):
                self._put(binding)
            if self.broken is not None:
                self._cuda.begin_capture(self._cuda.create_stream())
                raise RuntimeError(self.broken)
            self.captured[number] = binding
            self._put(binding)
        if waits:
            self._cuda.queue.synchronise()

    def _put(self, binding: ort.IOBinding) -> None:
        self._cuda.queue.enqueue(lambda: self._computes.run_with_iobinding(binding))
