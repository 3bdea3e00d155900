"""Bound calls that an engine keeps: binding the same views again gives the same call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .base import Call, View

MAX_CALLS = 512
"""Calls kept; the least recently used one is dropped beyond this."""

Bind: TypeAlias = Callable[[str, Mapping[str, View], Mapping[str, View]], Call]


class BoundCalls:
    """The calls of one engine, by graph, addresses and shapes."""

    def __init__(self, settle: Callable[[], None] | None = None):
        """`settle` is called before a call is dropped, on an engine where it may still be at work."""
        self._settle = settle
        self._calls: OrderedDict[tuple[Any, ...], Call] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View], bind: Bind) -> Call:
        """The call of these views, made by `bind` where there is none."""
        key = (
            graph,
            *((name, view.address, view.shape) for name, view in inputs.items()),
            *((name, view.address, view.shape) for name, view in outputs.items()),
        )
        call = self._calls.get(key)
        if call is not None:
            self._calls.move_to_end(key)
            return call
        call = self._calls[key] = bind(graph, inputs, outputs)
        if len(self._calls) > MAX_CALLS:
            if self._settle is not None:
                self._settle()
            self._calls.popitem(last=False)
        return call

    def clear(self) -> None:
        """Drop all of them."""
        self._calls.clear()
