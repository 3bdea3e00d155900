"""The calls that name the target's best tokens on a device: of its logits, or of those that a request changes."""

from __future__ import annotations

from collections.abc import Callable

from ..bundle.manifest import Limits
from ..engines.base import Call, Engine, View
from .cycle_program import Transfers
from .device.logits_processors import DeviceLogitsProcessors
from .device_passes import DevicePasses, TreeViews
from .forward_pass import ForwardPass
from .head import HeadOutputs

BindHead = Callable[[dict[str, View]], list[Call]]
"""A head without its outputs → its calls."""


class DeviceArgmax:
    """Binds heads, and the graphs that change their logits."""

    def __init__(
        self, engine: Engine, heads: HeadOutputs, device_passes: DevicePasses, limits: Limits, vocab_size: int
    ):
        self._engine, self._heads, self._device_passes = engine, heads, device_passes
        self._limits, self._vocab_size = limits, vocab_size
        self._processors: DeviceLogitsProcessors | None = None

    @property
    def processors(self) -> DeviceLogitsProcessors:
        """The graphs that change logits, which few requests ask for."""
        if self._processors is None:
            self._processors = DeviceLogitsProcessors(self._engine, self._limits, self._vocab_size)
        return self._processors

    def judge(
        self, forward_pass: ForwardPass, width: int, transfers: Transfers, tokens: View, nodes: TreeViews
    ) -> list[Call]:
        """What the target says of the nodes `tokens` of a pass, and the last calls of a program."""
        best = transfers.down.view("best", width)
        finite = transfers.down.view("finite", width, dtype="bool")
        inputs = {"hidden": forward_pass.result, "row_index": self._heads.row_range(width)}
        head = lambda outputs: [self._engine.bind("head", inputs, outputs)]  # noqa: E731
        calls = self.best(head, best, finite, transfers, tokens, nodes)
        return calls if transfers.graph is None else [*calls, self.processors.keep()]

    def best(
        self,
        head: BindHead,
        best: View,
        finite: View,
        transfers: Transfers,
        tokens: View,
        nodes: TreeViews,
    ) -> list[Call]:
        """The likeliest tokens by `head`: of its logits, or of those that a request changes, token by token behind
        those of the `tokens` that are its ancestors. `nodes`: of the logits."""
        if transfers.graph is None:
            return head({"best": best, "finite": finite})
        processors, (num_logits,), span = self.processors, best.shape, tokens.shape[0]
        (depths, ancestors), chain = nodes, nodes if num_logits == span else self._device_passes.chain(span)
        flat = lambda view, *shape: view.buffer.view(shape, view.dtype, view.offset)  # noqa: E731
        inputs = {
            "tokens": tokens, "token_depths": flat(chain[0], span),
            "depths": flat(depths, num_logits), "ancestors": flat(ancestors, num_logits, span),
        }  # fmt: skip
        calls = head({"logits": processors.raw(num_logits), "finite": finite})
        return [
            *calls,
            processors.call(transfers.graph, transfers.inputs(processors.sent), inputs, best),
        ]
