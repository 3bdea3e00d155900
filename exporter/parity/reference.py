"""The reference model: transformers' own class, either whole in memory or streaming one module's tensors at a time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn

from ...runtime.errors import ExportError
from ..checkpoint import Checkpoint, TensorFiles

# Tables that transformers ties: any of these may stand for any other when the checkpoint stores the table once.
TIED_SUFFIXES = ("shared.weight", "embed_tokens.weight", "lm_head.weight")


def load_reference(checkpoint: Checkpoint, *, streamed: bool) -> Any:
    """The model in float32, eager attention, evaluation mode.

    `streamed`: parameters are read from the checkpoint when a module runs and dropped afterwards, so that memory stays
    near the largest tensor. Raises ExportError when transformers cannot load it.
    """
    kind = getattr(transformers, checkpoint.architecture, None)
    if kind is None:
        raise ExportError(
            f"transformers {transformers.__version__} has no {checkpoint.architecture} to compare with"
        )
    with _quiet():
        if streamed:
            return _streamed(kind, checkpoint)
        return _whole(kind, checkpoint)


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


def _whole(kind: Any, checkpoint: Checkpoint) -> Any:
    try:
        model = kind.from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ExportError(
            f"transformers cannot load {checkpoint.folder}: {str(error).splitlines()[0]}"
        ) from error
    return model.eval()


def _streamed(kind: Any, checkpoint: Checkpoint) -> Any:
    config = type(checkpoint.config).from_dict(checkpoint.config.to_dict())
    for part in (
        config,
        *(getattr(config, n, None) for n in ("text_config", "vision_config", "qformer_config")),
    ):
        if part is not None:
            part._attn_implementation = "eager"
    with _parameters_on_meta():
        model = kind(config)
    for name, module in model.named_modules():
        owned = list(module._parameters)
        if owned:
            module.register_forward_pre_hook(_loader(checkpoint.tensors, name, owned), with_kwargs=True)
            module.register_forward_hook(_dropper(owned))
    return model.eval()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters get shapes without memory; buffers (angles, position ids) keep their values."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None:
            self._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _loader(tensors: TensorFiles, path: str, owned: list[str]) -> Any:
    def load(module: nn.Module, args: Any, kwargs: Any) -> None:
        for name in owned:
            if module._parameters[name] is None:
                continue
            source = stored_name(tensors, f"{path}.{name}" if path else name)
            module._parameters[name] = nn.Parameter(tensors.read(source).float(), requires_grad=False)

    return load


def _dropper(owned: list[str]) -> Any:
    def drop(module: nn.Module, args: Any, output: Any) -> None:
        for name in owned:
            value = module._parameters[name]
            if value is not None:
                module._parameters[name] = nn.Parameter(value.detach().to("meta"), requires_grad=False)
        gc.collect(0)

    return drop


def stored_name(tensors: TensorFiles, name: str) -> str:
    """The checkpoint's name of a parameter; tied tables are stored under one of several."""
    if name in tensors:
        return name
    if name.endswith(TIED_SUFFIXES):
        scope = name.rpartition(".")[0].rpartition(".")[0]
        ranked = [n for n in tensors if n.endswith(TIED_SUFFIXES)]
        for candidate in sorted(ranked, key=lambda n: (not n.startswith(scope), len(n))):
            return candidate
    raise ExportError(f"the checkpoint {tensors.folder} has no tensor {name!r}")
