"""What torch computes anew in every export although it does not change: computed once in a process.

It is more than a third of the time in which a small module is traced. The places are private to torch: where one is not found,
exports are slower and otherwise the same.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any


@functools.cache
def keep_constants_of_torch() -> None:
    """Change torch, in this process. A second call does nothing."""
    for keep in (keep_registry, keep_composite_operators):
        with contextlib.suppress(ImportError, AttributeError):
            keep()


def keep_registry() -> None:
    """The table of translations, with a signature of each, is made once (0.6 s the first time, 0.1 s after). Every export gets a
    copy, to which it adds its own."""
    from torch.onnx._internal.exporter import _registration

    original = _registration.ONNXRegistry.from_torchlib.__func__
    made = functools.cache(original)

    def from_torchlib(cls: Any, *arguments: Any, **options: Any) -> Any:
        registry = made(cls, *arguments, **options)
        copy = cls()
        vars(copy).update(vars(registry))
        copy.functions = {target: list(functions) for target, functions in registry.functions.items()}
        return copy

    _registration.ONNXRegistry.from_torchlib = classmethod(from_torchlib)  # type: ignore[assignment]


def keep_composite_operators() -> None:
    """The operators that the dispatcher composes of others are looked up in Python again only where there are new ones."""
    import torch
    from torch._export import utils

    materialize = utils._materialize_cpp_cia_ops
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key
    known: set[str] = set()

    def materialize_new() -> None:
        names = registrations("CompositeImplicitAutograd")
        if not known.issuperset(names):
            materialize()
            known.update(names)

    utils._materialize_cpp_cia_ops = materialize_new
