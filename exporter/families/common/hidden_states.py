"""Hidden states between the layers of a real model: one place that says what "after n layers" means.

They are what enters layer n, not what layer n − 1 gives: between the two a model may add to them (DeepStack).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

Seen = Callable[[int, torch.Tensor], "torch.Tensor | None"]
"""(number of layers, hidden states [B, T, E] after them) → what is to be read in their place, or None: themselves."""


@contextmanager
def hidden_states_after(
    layers: nn.ModuleList, final_norm: nn.Module, numbers: Iterable[int], seen: Seen
) -> Iterator[None]:
    """Shows `seen` the hidden states after so many layers, of what the model runs meanwhile.

    `numbers` are in 0..L; after all L layers they are what the final norm reads.
    """

    def hook(number: int, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        others = seen(number, given[0] if given else named["hidden_states"])
        if others is None:
            return None
        return ((others, *given[1:]), named) if given else (given, named | {"hidden_states": others})

    with ExitStack() as stack:
        for number in sorted(set(numbers)):
            reader = layers[number] if number < len(layers) else final_norm
            handle = reader.register_forward_pre_hook(
                lambda _module, given, named, number=number: hook(number, given, named), with_kwargs=True
            )
            stack.callback(handle.remove)
        yield
