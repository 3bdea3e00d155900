"""What the layers of a target are given while it reads records: all but the hidden states, which change as layers do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...exporter.families.common.reference import collate
from ..data.reading.records import Record
from ..targets.target import Target


class _ReadEnough(Exception):
    """The last layer has been called: what follows is not needed."""


def first_of(output: Any) -> Tensor:
    """The hidden states in what a layer gives."""
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class Arguments:
    """Of one call of a layer, beside its hidden states."""

    others: tuple[Any, ...]
    named: Mapping[str, Any]

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """What the layer makes of hidden states [1, T, E]."""
        return first_of(layer(hidden, *self.others, **self.named))


@dataclass
class Calls:
    """Records on their way through layers: `hidden` [1, T, E] of each, and for each layer the arguments for each, and what
    was added to what the layer before it gave, [1, T, E] or None (DeepStack)."""

    hidden: list[Tensor]
    arguments: list[list[Arguments]]
    added: list[list[Tensor | None]]

    @property
    def tokens(self) -> int:
        """Positions of all records."""
        return sum(hidden.shape[1] for hidden in self.hidden)

    def outputs(self, layer: nn.Module, index: int) -> Iterator[Tensor]:
        """What layer `index`, now `layer`, makes of each record's hidden states."""
        for hidden, arguments in zip(self.hidden, self.arguments[index], strict=True):
            yield arguments.run(layer, hidden)

    def advance(self, layer: nn.Module, index: int) -> None:
        """Let each record's hidden states pass layer `index`, now `layer`."""
        self.hidden = list(self.outputs(layer, index))
        self.arguments[index] = []
        if index + 1 < len(self.added):
            pairs = zip(self.hidden, self.added[index + 1], strict=True)
            self.hidden = [hidden if added is None else hidden + added for hidden, added in pairs]
            self.added[index + 1] = []


@torch.no_grad()
def record_calls(target: Target, layers: nn.ModuleList, records: Sequence[Record]) -> Calls:
    """One pass of the target as it is now over each record, prompt and text, alone: nothing is padded."""
    calls = Calls([], [[] for _ in layers], [[] for _ in layers])
    with _recording(layers, calls):
        for record in records:
            inputs = collate(target.family, [target.prompt(record)], [target.answer(record)[:-1]])
            with suppress(_ReadEnough):
                target.model(**target.moved(inputs), use_cache=False)
    return calls


@contextmanager
def _recording(layers: nn.ModuleList, calls: Calls) -> Iterator[None]:
    last: list[Tensor] = []

    def keep(index: int, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        hidden, others = (given[0], given[1:]) if given else (named.pop("hidden_states"), ())
        if index == 0:
            calls.hidden.append(hidden)
        else:
            before = last.pop()
            calls.added[index].append(None if torch.equal(hidden, before) else hidden - before)
        calls.arguments[index].append(Arguments(others, named))
        if index == len(layers) - 1:
            raise _ReadEnough

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hook = layer.register_forward_pre_hook(
                lambda _layer, given, named, index=index: keep(index, given, named), with_kwargs=True
            )
            hooks.callback(hook.remove)
            hook = layer.register_forward_hook(lambda _layer, _given, output: last.append(first_of(output)))
            hooks.callback(hook.remove)
        yield
