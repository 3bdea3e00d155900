"""The whole model in memory, by transformers; of a quantized checkpoint the original class with the numbers that its integers
stand for."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from .adapter import CONFIG
from .checkpoint import Checkpoint
from .merging import MergedTensors
from .names import StoredNames
from .peft_model import merge_into


def load_whole(checkpoint: Checkpoint, **options: Any) -> Any:
    """The model in float32, with the checkpoint's adapter in its weights. `options` are those of `from_pretrained`, whose
    errors are raised."""
    if checkpoint.layout is not None:
        model = _filled(checkpoint, **options)
        return model if checkpoint.adapter is None else merge_into(model, checkpoint.adapter)
    with _without_adapter(checkpoint.folder) as folder:
        model = checkpoint.model_class.from_pretrained(
            folder,
            config=copy.deepcopy(checkpoint.config),  # some classes change it
            dtype=torch.float32,
            local_files_only=True,
            **options,
        )
    return model if checkpoint.adapter is None else merge_into(model, checkpoint.adapter)


def _filled(checkpoint: Checkpoint, attn_implementation: str | None = None) -> Any:
    """The model's class with parameters, and buffers that are stored, from the checkpoint's tensors. transformers would ask
    for the library that wrote them, and compute with rounded rows. Raises ExportError for a parameter that is not there."""
    config: Any = copy.deepcopy(checkpoint.config)
    if attn_implementation is not None:
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            if part is not None:
                part._attn_implementation = attn_implementation
    with parameters_on_meta():
        model: Any = checkpoint.model_class(config).float()
    tensors, names = checkpoint.tensors, checkpoint.names
    if isinstance(tensors, MergedTensors):  # peft merges the adapter, into numbers without it
        tensors = tensors.base
        names = StoredNames(tensors, model)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for own, parameter in module._parameters.items():
            if parameter is not None:
                value = tensors.read(names.stored(prefix + own)).to(torch.float32)
                module._parameters[own] = nn.Parameter(value)
        for own, buffer in module._buffers.items():
            disk = names.held(prefix + own)
            if buffer is not None and disk is not None:
                buffer.copy_(tensors.read(disk))
    missing = {n for n, _ in model.named_parameters(remove_duplicate=False) if names.held(n) is None}
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    if (checkpoint.folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    return model.eval()


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
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


@contextlib.contextmanager
def _without_adapter(folder: Path) -> Iterator[Path]:
    """`folder`, or where an adapter lies beside the weights, which transformers would apply by itself, links to the rest."""
    if not (folder / CONFIG).is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        for path in folder.iterdir():
            if path.is_file() and not path.name.startswith("adapter_"):
                (Path(place) / path.name).symlink_to(path.resolve())
        yield Path(place)
