"""The reference model: transformers' own class, either whole in memory or streaming one module's tensors at a time."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..checkpoint import Checkpoint
from ..checkpoint.whole import load_whole, parameters_on_meta
from ..common.float64 import arithmetic_as_asked
from ..graphs.dtypes import TORCH

COLLECT_BYTES = 16 << 20
"""From here on a dropped tensor is worth looking for what still holds it."""


def load_exact(checkpoint: Checkpoint, dtype: str = "float32") -> Any:
    """The model for `float64_arithmetic`: streamed, its parameters rounded to `dtype`, in float64."""
    with _quiet():
        return _streamed(checkpoint, TORCH[dtype], torch.float64)


def load_reference(checkpoint: Checkpoint, dtype: str = "float32", *, streamed: bool) -> Any:
    """The model in float32, eager attention, evaluation mode; its parameters are rounded to `dtype`, as a bundle's.

    `streamed`: parameters are read from the checkpoint when a module runs and dropped afterwards, so that memory stays
    near the largest tensor. Raises ExportError when transformers cannot load it.
    """
    with _quiet():
        return _streamed(checkpoint, TORCH[dtype]) if streamed else rounded(_whole(checkpoint), TORCH[dtype])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no notes of transformers: stdout and stderr belong to the command."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _whole(checkpoint: Checkpoint) -> Any:
    try:
        model = load_whole(checkpoint, attn_implementation="eager")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise_if_foreign(error)
        raise ExportError(
            f"transformers cannot load {checkpoint.folder}: {str(error).splitlines()[0]}"
        ) from error
    return model.eval()


def _streamed(checkpoint: Checkpoint, dtype: torch.dtype, compute: torch.dtype = torch.float32) -> Any:
    config: Any = copy.deepcopy(checkpoint.config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part._attn_implementation = "eager"
    with parameters_on_meta():
        model = checkpoint.model_class(config).to(compute)
    for name, module in model.named_modules():
        owned = list(module._parameters)
        if owned:
            module.register_forward_pre_hook(
                _loader(checkpoint, name, owned, dtype, compute), with_kwargs=True
            )
            module.register_forward_hook(_dropper(owned))
    return model.eval()


def rounded(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`module` itself, its float32 parameters rounded to what `dtype` can hold."""
    if dtype != torch.float32:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype).float()
    return module


def _loader(
    checkpoint: Checkpoint, path: str, owned: list[str], dtype: torch.dtype, compute: torch.dtype
) -> Any:
    def load(module: nn.Module, args: Any, kwargs: Any) -> None:
        for name in owned:
            if module._parameters[name] is None:
                continue
            with arithmetic_as_asked():
                tensor = checkpoint.tensors.read(checkpoint.stored(f"{path}.{name}" if path else name))
                if dtype.itemsize < tensor.dtype.itemsize or dtype.itemsize == 2:
                    tensor = tensor.to(dtype)
                wide = torch.empty(tensor.shape, dtype=compute).copy_(tensor)  # without a copy in between
                module._parameters[name] = nn.Parameter(wide, requires_grad=False)

    return load


def _dropper(owned: list[str]) -> Any:
    def drop(module: nn.Module, args: Any, output: Any) -> None:
        dropped = 0
        for name in owned:
            value = module._parameters[name]
            if value is not None:
                dropped += value.nbytes
                module._parameters[name] = nn.Parameter(value.detach().to("meta"), requires_grad=False)
        if dropped >= COLLECT_BYTES:
            gc.collect(0)

    return drop
