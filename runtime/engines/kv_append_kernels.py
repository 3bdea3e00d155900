"""What a GPU does around a portable plan: masks in two parts before it, new keys and values into the caches after it.

`runtime/engines/kv_append.py` is the same in numpy. Where they begin is read on the device, so that both can be
captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_longlong, c_uint, c_ulonglong
from pathlib import Path
from typing import Any

import numpy as np

from ..common.bfloat16 import masked_value
from .base import DTYPES, View
from .device import DeviceEngine

KERNELS = ("split_mask", "append_rows")
CODE = "rows.ptx"
"""Beside this file, with the source it was made of."""

THREADS = 256
WORD = 4
"""Bytes that a thread copies."""


class Appending:
    """The kernels on one engine."""

    def __init__(self, engine: DeviceEngine):
        code = Path(__file__).with_name(CODE).read_bytes()
        self._engine, self._functions = engine, engine.cuda.load_kernels(code, *KERNELS)

    def split(self, mask: View, starts: View, before: View, own: View) -> Kernel:
        """The parts of `mask` [batch, heads, width, cache] whose sequence b writes from slot `starts[b]` (int64) on:
        `before`, same shape, and `own` [batch, heads, width, width]."""
        _, heads, width, cache = mask.shape
        dtype = DTYPES[mask.dtype]
        hidden = 0 if mask.dtype == "bool" else int.from_bytes(masked_value(dtype).tobytes(), "little")
        arguments = (
            *(c_ulonglong(view.address) for view in (mask, before, own, starts)),
            *(c_int(number) for number in (heads, width, cache, dtype.itemsize)),
            c_uint(hidden),
            c_longlong(mask.size),
        )
        return self._kernel("split_mask", mask.size, 1, arguments, (mask, starts, before, own))

    def append(self, pairs: Sequence[tuple[View, View]], starts: View) -> Kernel:
        """For every pair, all of one shape, new rows [batch, heads, width, D] into the cache [batch, heads, capacity, D],
        those of sequence b from slot `starts[b]` on. Raises `ValueError` for heads that are no whole words."""
        new_kv, cache = pairs[0]
        _, heads, width, size = new_kv.shape
        nbytes = size * DTYPES[new_kv.dtype].itemsize
        if nbytes % WORD:
            raise ValueError(f"{new_kv.buffer.name}: {nbytes} bytes per row are not a multiple of {WORD}")
        addresses = np.array([[one.address for one in pair] for pair in pairs], np.int64)
        table = self._engine.constant("append.table", addresses)
        words = nbytes // WORD
        count = new_kv.nbytes // WORD
        arguments = (
            *(c_ulonglong(view.address) for view in (table, starts)),
            *(c_int(number) for number in (heads, width, cache.shape[2], words)),
            c_longlong(count),
        )
        views = (table, starts, *(view for pair in pairs for view in pair))
        return self._kernel("append_rows", count, len(pairs), arguments, views)

    def _kernel(
        self, name: str, count: int, tensors: int, arguments: Sequence[Any], keep: Sequence[View]
    ) -> Kernel:
        blocks = (-(-count // THREADS), tensors)
        return Kernel(self._engine, self._functions[name], blocks, arguments, keep)


class Kernel:
    """One launch with fixed arguments. `keep` holds what lies at the addresses."""

    __slots__ = ("_arguments", "_blocks", "_engine", "_function", "_keep")

    def __init__(
        self,
        engine: DeviceEngine,
        function: int,
        blocks: tuple[int, int],
        arguments: Sequence[Any],
        keep: Sequence[View],
    ):
        self._engine, self._function, self._blocks = engine, function, blocks
        self._arguments, self._keep = arguments, keep

    def run(self) -> None:
        engine = self._engine
        engine.cuda.run_kernel(self._function, self._blocks, THREADS, self._arguments, engine.stream)
