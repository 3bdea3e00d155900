"""Models whose parameters have shapes and types but no memory: exporting never holds weights."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...runtime.common.errors import UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign
from .hooks import attention_named


def hollow_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a model on the meta device and gives every parameter one shared zero, expanded to its shape.

    Buffers stay on the meta device; the family replaces the modules that own buffers it traces. Inside `export_hooks`
    or outside makes no difference. Raises UnsupportedModelError for a configuration that transformers cannot build.
    """
    try:
        with attention_named(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build()
    except Exception as error:  # sizes that do not divide, unknown activations, …: each raises its own kind
        raise_if_foreign(error)
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
    """What decides how a module traces: classes, shapes of parameters, values of buffers and of plain attributes
    (numbers, texts, tensors, and lists, tuples, sets and dicts of them), without layer indices.

    Two layers with equal signatures export to the same graph and differ only in their weights.
    """
    entries = []
    for path, child in module.named_modules():
        plain = tuple(
            (key, _frozen(value))
            for key, value in sorted(vars(child).items())
            if key != "layer_idx" and not key.startswith("_")
        )
        shapes = tuple(
            (name, tuple(p.shape), str(p.dtype)) for name, p in child.named_parameters(recurse=False)
        ) + tuple((name, _frozen(b)) for name, b in child.named_buffers(recurse=False))
        entries.append((path, type(child).__qualname__, plain, shapes))
    return tuple(entries)


def _frozen(value: Any) -> Any:
    """A hashable stand-in that is equal exactly for equal values; of other objects only the kind counts."""
    if isinstance(value, torch.Tensor):
        content = "" if value.is_meta else hashlib.sha256(value.detach().cpu().numpy().tobytes()).hexdigest()
        return "tensor", tuple(value.shape), str(value.dtype), content
    if isinstance(value, dict):
        return "dict", tuple(
            sorted(((repr(k), _frozen(v)) for k, v in value.items()), key=lambda item: item[0])
        )
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(_frozen(v) for v in value)
    if isinstance(value, set | frozenset):
        return "set", tuple(sorted(map(repr, value)))
    if value is None or isinstance(value, int | float | str | bool):
        return type(value).__name__, value
    return type(value).__qualname__, getattr(value, "__qualname__", "")
