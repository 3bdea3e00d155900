"""What a library says where there is no memory, and what helps: the one place that knows either."""

from __future__ import annotations

LESS = "load with a smaller max_length or max_batch"
"""What helps everywhere."""

LESS_ON_A_GPU = (
    f"{LESS}, or build the bundle, and its plans, again with a smaller --max-length or --max-batch or in fp16 "
    "(--precision fp16)"
)
"""What helps on a GPU, which computes in the types of the bundle; plans hold a cache as long as the bundle's limits."""

_SIGNS = (
    *("out of memory", "outofmemory", "memoryallocation", "memory_allocation"),
    *("failed to allocate", "could not be allocated", "alloc_failed", "bad_alloc", "bad allocation"),
)
"""Of ONNX Runtime, CUDA and its libraries, C++, TensorRT; in small letters."""


def out_of_memory(*messages: str) -> bool:
    """Whether one of these messages tells of memory that was not there."""
    return any(sign in each.lower() for each in messages for sign in _SIGNS)
