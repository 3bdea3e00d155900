"""A graph in ONNX Runtime, as the engine has it and without the engine."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
from vlmexport.runtime.engines.onnxruntime import use_global_pool


def onnx_session(model: Path | bytes) -> ort.InferenceSession:
    """On the process's one pool of threads, silent. `model` is a file, or what is in one."""
    use_global_pool()
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 4
    given = model if isinstance(model, bytes) else str(model)
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
