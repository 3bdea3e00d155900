"""How many threads a target is computed with on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...runtime.engines.onnxruntime import SINGLE_THREAD_BYTES
from .target import Target


@contextmanager
def with_threads(target: Target, asked: int | None) -> Iterator[None]:
    """Within the block PyTorch uses as many threads as `asked`, or one for a small model on a CPU, as the runtime does: where other
    work has a core, every product of a small model waits for the thread that does not run."""
    before = torch.get_num_threads()
    if asked is not None:
        torch.set_num_threads(asked)
    elif target.device.type == "cpu" and weight_bytes(target) < SINGLE_THREAD_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weight_bytes(target: Target) -> int:
    """Bytes of the target's weights, tied ones once."""
    return sum(parameter.nbytes for parameter in target.model.parameters())
