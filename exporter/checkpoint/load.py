"""Opens a model: an alias, a local folder, or a Hugging Face hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from ...runtime.common.errors import ExportError, UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign
from ...runtime.common.paths import is_folder
from ..common.aliases import check_known, find_alias, is_hub_id
from ..common.one_line import first_line
from .adapter import adapter_for
from .checkpoint import Checkpoint, named_weights
from .hub import SMALL, described, download
from .integer_tensors import shown_tensors
from .layouts.table import find_layout, without_layout
from .merging import Merger
from .originals import check_exportable
from .tensors import TensorFiles

LONGEST_FILE = 512 << 20
"""Bytes. Large vocabularies have some tens of MB."""


def hub_id_of(model: str) -> str | None:
    """The hub id that `model` is or stands for; None for a folder and for a bundled model."""
    alias = find_alias(model)
    if alias is not None:
        return alias.hub_id or None
    return model if is_hub_id(model) else None


def open_checkpoint(
    model: str | Path, *, weights: bool = True, adapter: str | Path | None = None
) -> Checkpoint:
    """Opens an alias, a folder or a hub id (downloaded into the hub's cache).

    Without `weights` those of a hub model are not downloaded but described by their headers; see `Checkpoint.fetch`.
    `adapter` is a folder or hub id of an adapter that is merged into the weights as they are read, or `adapter.NONE`
    where one beside the model's weights is to be left out.

    Raises OptionError for a name that is none of them, ExportError when it cannot be fetched or read, and
    UnsupportedModelError when transformers does not know the model type or it needs code of its own, or when it is quantized
    in a way that is not read.
    """
    source = str(model)
    check_known(source)
    alias = find_alias(source)
    hub_id = None
    if alias is not None and alias.folder is not None:
        folder = alias.folder
    elif alias is not None:
        hub_id, folder = alias.hub_id, Path()
    elif is_folder(source):
        folder = Path(source)
    else:
        hub_id, folder = source, Path()
    tensors = None
    if hub_id is not None and weights:
        folder = download(hub_id)
    elif hub_id is not None:
        folder, tensors = described(hub_id)
    _check_files(folder)
    merged = adapter_for(
        folder, source, None if adapter is None else str(adapter), described=tensors is not None
    )
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder} has no config.json; give a Hugging Face model folder")
    check_exportable(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise_if_foreign(error)
        raise UnsupportedModelError(
            f"the configuration in {folder} is not understood: {first_line(error)}"
        ) from error
    except Exception as error:  # strict configuration classes raise their own validation errors
        raise_if_foreign(error)
        raise UnsupportedModelError(
            f"the configuration in {folder} is invalid: {first_line(error)}"
        ) from error
    _check_types(config, folder)
    _size_decoder_cache(config)
    parts = _parts(config)
    layout = find_layout(parts, str(folder))
    without_layout(parts)
    tensors = shown_tensors(tensors or TensorFiles(folder, named_weights(config)), layout)
    checkpoint = Checkpoint(source, folder, config, tensors, alias, hub_id, layout=layout)
    if merged is not None:
        checkpoint.merger = Merger(merged, checkpoint.model_class, checkpoint.config)
        checkpoint.merge_adapter()
    return checkpoint


def _check_files(folder: Path) -> None:
    """ExportError for a description that is a pipe, which would be waited for, or longer than any model's."""
    for path in sorted(p for pattern in SMALL for p in folder.glob(pattern)):
        if not path.is_file():
            raise ExportError(f"{path} is not a regular file")
        if path.stat().st_size > LONGEST_FILE:
            raise ExportError(f"{path} has {path.stat().st_size} bytes; no model's description is so long")


def _check_types(config: PreTrainedConfig, folder: Path) -> None:
    """UnsupportedModelError for values that transformers takes over unseen and would trip over later."""
    if not isinstance(config.architectures, list | tuple | None):
        raise UnsupportedModelError(
            f"{folder}: architectures={config.architectures!r:.80} is not a list of class names; correct config.json"
        )
    for dtype in [getattr(part, "dtype", None) for part in _parts(config)]:
        known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(known, torch.dtype | dict | None):
            raise UnsupportedModelError(
                f"{folder}: dtype={dtype!r:.80} is no type of numbers; correct config.json (float32, say)"
            )


def _parts(config: PreTrainedConfig) -> list[Any]:
    """The configuration, and those of the parts of the model."""
    return [
        config,
        *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None),
    ]


def _size_decoder_cache(config: PreTrainedConfig) -> None:
    """Lets `generate` work for a T5 whose decoder is deeper than its encoder, and for one whose `decoder_layers` is wrong.

    transformers sizes the cache by `num_layers`, the encoder's count, unless there is a `decoder_layers`, which it reads
    for nothing else.
    """
    for part in (config, getattr(config, "text_config", None)):
        depth = getattr(part, "num_decoder_layers", None)
        if part is not None and depth is not None:
            part.decoder_layers = depth
