"""The whole model in memory, by transformers."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .adapter import CONFIG
from .checkpoint import Checkpoint
from .peft_model import merge_into


def load_whole(checkpoint: Checkpoint, **options: Any) -> Any:
    """The model in float32, with the checkpoint's adapter in its weights. `options` are those of `from_pretrained`, whose
    errors are raised."""
    with _without_adapter(checkpoint.folder) as folder:
        model = checkpoint.model_class.from_pretrained(
            folder,
            config=copy.deepcopy(checkpoint.config),  # some classes change it
            dtype=torch.float32,
            local_files_only=True,
            **options,
        )
    return model if checkpoint.adapter is None else merge_into(model, checkpoint.adapter)


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
