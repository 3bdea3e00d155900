"""The reference model: transformers' own class, either whole in memory or streaming one module's tensors at a time."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from logging import LogRecord, getLogger
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..checkpoint import Checkpoint
from ..checkpoint.whole import load_whole, parameters_on_meta
from ..common.float64 import arithmetic_as_asked
from ..graphs.dtypes import TORCH
from ..quantization.matrix import QuantizedMatrix
from ..quantization.reading import read_dequantized
from .large_matrices import WIDE, compute_in_float64, keeps_stored

KERNELS = "transformers.integrations.hub_kernels"
"""Where transformers says that a package would be faster than its own operators, which are the reference."""

COLLECT_BYTES = 16 << 20
"""From here on a dropped tensor is worth looking for what still holds it."""


READ_BY_PARENT = {
    "Lfm2ShortConv": "conv",
    "Qwen3_5GatedDeltaNet": "conv1d",
    "Siglip2VisionEmbeddings": "position_embedding",
}
"""Class of a module → a child whose parameters it reads itself, without calling it."""


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
        if streamed:
            return _streamed(checkpoint, TORCH[dtype])
        if _quantized(checkpoint):
            return _with_integers(checkpoint, TORCH[dtype])
        return rounded(_whole(checkpoint), TORCH[dtype])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no notes of transformers: stdout and stderr belong to the command."""
    from transformers.utils import logging

    getLogger(KERNELS).addFilter(_is_news)
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _is_news(record: LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()


def _whole(checkpoint: Checkpoint) -> Any:
    try:
        model = load_whole(checkpoint, attn_implementation="eager")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise_if_foreign(error)
        raise ExportError(
            f"transformers cannot load {checkpoint.folder}: {str(error).splitlines()[0]}"
        ) from error
    return model.eval()


def _quantized(checkpoint: Checkpoint) -> Mapping[str, QuantizedMatrix]:
    """Tensors of the checkpoint that a bundle stores as integers."""
    return checkpoint.tensors.quantized


def _with_integers(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The whole model, its matrices of integers as a bundle of `dtype` has them."""
    model = rounded(_whole(checkpoint), dtype)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _stored(checkpoint, path, name) in _quantized(checkpoint):
                _load(checkpoint, module, path, name, dtype, torch.float32)
    return model


def _stored(checkpoint: Checkpoint, path: str, name: str) -> str:
    """The tensor of a parameter of the module at `path`."""
    return checkpoint.stored(f"{path}.{name}" if path else name)


def _empty(checkpoint: Checkpoint, compute: torch.dtype) -> Any:
    """The model with buffers in `compute`, and without memory for its parameters."""
    config: Any = copy.deepcopy(checkpoint.config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part._attn_implementation = "eager"
    with parameters_on_meta():
        return checkpoint.model_class(config).to(compute)


def _streamed(checkpoint: Checkpoint, dtype: torch.dtype, compute: torch.dtype = torch.float32) -> Any:
    model = _empty(checkpoint, compute)
    for name, module in model.named_modules():
        if module._parameters:
            narrow = compute == WIDE and keeps_stored(module)
            load, drop = _loader_and_dropper(checkpoint, module, name, dtype, None if narrow else compute)
            module.register_forward_pre_hook(load, with_kwargs=True)
            module.register_forward_hook(drop)
            if narrow:
                compute_in_float64(module)
        if (path := READ_BY_PARENT.get(type(module).__name__)) is not None:
            _stream_child(checkpoint, module, name, path, dtype, compute)
    for module in model.modules():
        # Its `device` is that of its first parameter, and some models put there what they compute.
        if isinstance(module, PreTrainedModel):
            nothing = nn.Parameter(torch.empty(0, dtype=compute), requires_grad=False)
            module.register_parameter("on_cpu", nothing)
    return model.eval()


def _stream_child(
    checkpoint: Checkpoint, module: nn.Module, path: str, name: str, dtype: torch.dtype, compute: torch.dtype
) -> None:
    """The parameters of a child are there while `module`, at `path`, runs."""
    child = module.get_submodule(name)
    load, drop = _loader_and_dropper(checkpoint, child, f"{path}.{name}", dtype, compute)
    module.register_forward_pre_hook(lambda _, args, kwargs: load(child, args, kwargs), with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: drop(child, args, output))


def rounded(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`module` itself, its float32 parameters rounded to what `dtype` can hold."""
    if dtype != torch.float32:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype).float()
    return module


def _loader_and_dropper(
    checkpoint: Checkpoint, module: nn.Module, path: str, dtype: torch.dtype, compute: torch.dtype | None
) -> tuple[Any, Any]:
    """Hooks: one reads the parameters of the module at `path`, the other puts back those without memory."""
    empty = dict(module._parameters)

    def load(module: nn.Module, args: Any, kwargs: Any) -> None:
        for name in empty:
            _load(checkpoint, module, path, name, dtype, compute)

    def drop(module: nn.Module, args: Any, output: Any) -> None:
        dropped = sum(value.nbytes for value in module._parameters.values() if value is not None)
        module._parameters.update(empty)
        if dropped >= COLLECT_BYTES:
            gc.collect(0)

    return load, drop


def _load(
    checkpoint: Checkpoint,
    module: nn.Module,
    path: str,
    name: str,
    dtype: torch.dtype,
    compute: torch.dtype | None,
) -> None:
    """Gives a parameter of the module at `path` its numbers, as a bundle of `dtype` stores them, in `compute`; None: in
    the dtype in which they are read."""
    if module._parameters[name] is None:
        return
    with arithmetic_as_asked():
        stored = _stored(checkpoint, path, name)
        if stored in _quantized(checkpoint):
            tensor = read_dequantized(checkpoint.tensors, stored, dtype)
        else:
            tensor = checkpoint.tensors.read(stored)
            if dtype.itemsize < tensor.dtype.itemsize or dtype.itemsize == 2:
                tensor = tensor.to(dtype)
        if compute is not None:
            tensor = torch.empty(tensor.shape, dtype=compute).copy_(tensor)  # without a copy in between
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
