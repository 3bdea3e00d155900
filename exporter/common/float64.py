"""float64 in place of float32, also where a model's code asks for float32."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class _Widened(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def float64_arithmetic() -> Iterator[None]:
    """New tensors and conversions to float32 are float64: norms, softmax and angles of transformers' models ask for
    float32, whatever the model computes in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def arithmetic_as_asked() -> AbstractContextManager[object]:
    """Ends `float64_arithmetic` for a while."""
    return _disable_current_modes()


def with_error(
    network: nn.Module,
    function: Callable[..., torch.Tensor],
    given: Sequence[torch.Tensor | None],
    errors: Sequence[torch.Tensor | None] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`function(network, *given)` in float32, its error): float32 less float64, as float32.

    `errors` are those of `given` itself: float64 computes without them.
    """
    with torch.no_grad():
        expected = function(network, *given)
        with float64_arithmetic():
            wide = copy.deepcopy(network).double()
            exact = [None if tensor is None else tensor.double() for tensor in given]
            for place, (tensor, error) in enumerate(zip(exact, errors, strict=False)):
                if tensor is not None and error is not None:
                    exact[place] = tensor - error
            error = expected.double() - function(wide, *exact)
    return expected, error.to(torch.float32)
