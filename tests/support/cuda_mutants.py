"""Errors of the engine of ONNX Runtime's CUDA provider, planted in the real code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxruntime as ort
import pytest
from vlmexport.runtime.engines import onnxruntime_cuda
from vlmexport.runtime.engines.onnxruntime_cuda import NEVER, OnnxRuntimeCuda, _BoundCall

from tests.support import gpu_mutants as gpu

Patch = pytest.MonkeyPatch


def one_number_for_all_calls(patch: Patch) -> None:
    """Calls of a graph share what was captured of the first of them."""
    _numbered(patch, lambda number: number if number == NEVER else "1")


def runs_not_excluded(patch: Patch) -> None:
    """Runs outside of programs are captured, too, under one number."""
    _numbered(patch, lambda number: "0" if number == NEVER else number)


def _numbered(patch: Patch, number_of: Callable[[str], str]) -> None:
    made = onnxruntime_cuda.run_options

    def wrong(number: str) -> ort.RunOptions:
        return made(number_of(number))

    patch.setattr(onnxruntime_cuda, "run_options", wrong)


def updated_cache_elsewhere(patch: Patch) -> None:
    """An updated cache is bound to memory of its own."""
    gpu.updated_cache_elsewhere(patch, OnnxRuntimeCuda)


def nan_logits(patch: Patch) -> None:
    """Every fourth call of the head is given rows that are not numbers."""
    run, calls = _BoundCall.run, []

    def wrong(self: Any) -> None:
        if self._file.startswith("head"):
            calls.append(self)
            if len(calls) % 4 == 0:
                hidden = self._keep[0]
                self._engine.cuda.fill(hidden.address, 0xFF, 4, self._engine.stream)
        run(self)

    patch.setattr(_BoundCall, "run", wrong)
