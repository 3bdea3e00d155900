"""Models whose parameters have shapes and types but no memory: exporting never holds weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from ...runtime.errors import UnsupportedModelError


def hollow_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a model on the meta device and gives every parameter one shared zero, expanded to its shape.

    Buffers stay on the meta device; the family replaces the modules that own buffers it traces. Raises
    UnsupportedModelError for a configuration that transformers cannot build.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build()
    except Exception as error:  # sizes that do not divide, unknown activations, …: each raises its own kind
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedModelError(
            f"the configuration cannot be built as a model ({type(error).__name__}: {reason}); correct config.json"
        ) from error
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                zero = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(zero, requires_grad=False)
    return model.eval()


def signature(module: nn.Module) -> tuple:
    """What decides how a module traces: classes, parameter shapes, and plain attributes, without layer indices.

    Two layers with equal signatures export to the same graph and differ only in their weights.
    """
    rows = []
    for path, child in module.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(child).items())
            if isinstance(value, int | float | str | bool | tuple)
            and key != "layer_idx"
            and not key.startswith("_")
        )
        shapes = tuple(
            (name, tuple(p.shape), str(p.dtype)) for name, p in child.named_parameters(recurse=False)
        ) + tuple((name, tuple(b.shape), str(b.dtype)) for name, b in child.named_buffers(recurse=False))
        rows.append((path, type(child).__qualname__, plain, shapes))
    return tuple(rows)
