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


@dataclass(frozen=True)
class Arguments:
    """Of one call of a layer, beside its hidden states."""

    others: tuple[Any, ...]
    named: Mapping[str, Any]

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """What the layer makes of hidden states [1, T, E]."""
        output = layer(hidden, *self.others, **self.named)
        return output[0] if isinstance(output, tuple) else output


@dataclass
class Calls:
    """Records on their way through layers: `hidden` [1, T, E] of each, and for each layer the arguments for each."""

    hidden: list[Tensor]
    arguments: list[list[Arguments]]

    @property
    def tokens(self) -> int:
        """Positions of all records."""
        return sum(hidden.shape[1] for hidden in self.hidden)

    def outputs(self, layer: nn.Module, index: int) -> Iterator[Tensor]:
        """What layer `index`, now `layer`, makes of each record's hidden states."""
        for hidden, arguments in zip(self.hidden, self.arguments[index], strict=True):
            yield arguments.run(layer, hidden)


@torch.no_grad()
def record_calls(target: Target, layers: nn.ModuleList, records: Sequence[Record]) -> Calls:
    """One pass of the target as it is now over each record, prompt and text, alone: nothing is padded."""
    calls = Calls([], [[] for _ in layers])
    with _recording(layers, calls):
        for record in records:
            inputs = collate(target.family, [target.prompt(record)], [target.answer(record)[:-1]])
            with suppress(_ReadEnough):
                target.model(**target.moved(inputs), use_cache=False)
    return calls


@contextmanager
def _recording(layers: nn.ModuleList, calls: Calls) -> Iterator[None]:
    def keep(index: int, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        hidden, others = (given[0], given[1:]) if given else (named.pop("hidden_states"), ())
        if index == 0:
            calls.hidden.append(hidden)
        calls.arguments[index].append(Arguments(others, named))
        if index == len(layers) - 1:
            raise _ReadEnough

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hook = layer.register_forward_pre_hook(
                lambda _layer, given, named, index=index: keep(index, given, named), with_kwargs=True
            )
            hooks.callback(hook.remove)
        yield
